"""Language, addresses, test sets, personal data; HTML and licences; near duplicates."""

import json
import random

import numpy as np
import pytest
from pipeline_corpus import context_of, edit_yaml, make_corpus, sentence, write_lines

from shared_data.cleaning import Cleaner, CleanRules
from shared_data.dedup import write_digests
from shared_data.html import text_of_html
from shared_data.near import Banding, CompareBand, Signer, linked_documents
from shared_data.records import PLAIN, Document, Fields, document_of
from shared_data.screens import ContaminationCheck, LanguageCheck, UrlCheck, redact_emails, redact_ips
from shared_data.scripts import clean, download_raw


@pytest.mark.parametrize(
    ("text", "redacted", "count"),
    [
        ("write to jane.doe+x@mail.example.co.uk.", "write to name@example.com.", 1),
        ("<a@b.org>,c@d.io", "<name@example.com>,name@example.com", 2),
        ("mailto:root@localhost", "mailto:root@localhost", 0),
        ("@property def f(self): a @ b", "@property def f(self): a @ b", 0),
        ("user@.com, a@b", "user@.com, a@b", 0),
    ],
)
def test_email_addresses_are_replaced(text, redacted, count):
    assert redact_emails(text) == (redacted, count)


@pytest.mark.parametrize(
    ("text", "redacted", "count"),
    [
        ("from 8.8.4.4: ok", "from 192.0.2.1: ok", 1),
        ("192.168.0.1 10.0.0.1 127.0.0.1 169.254.1.1 0.0.0.0", None, 0),
        ("section 1.2.3.4.5, and 999.1.1.1", None, 0),
        ("at 2001:4860:4860::8888 and ::1 and fe80::1", "at 192.0.2.1 and ::1 and fe80::1", 1),
        ("std::vector a::b 12:30:45 x[::2]", None, 0),
    ],
)
def test_public_ip_addresses_are_replaced(text, redacted, count):
    assert redact_ips(text) == (redacted or text, count)


def test_language_is_recognised():
    english, french = "The weather was fine and the boats went out.", "Il faisait beau et les bateaux sont sortis."
    assert LanguageCheck("en", 0.65)(english) is None
    assert LanguageCheck("en", 0.65)(french) == "language"
    assert LanguageCheck("fr", 0.65)(french + "\n") is None
    assert LanguageCheck("en", 0.65)("0 1 2 3\n- - -") == "language"


@pytest.mark.parametrize(
    ("url", "blocked"),
    [
        ("https://bad.example/x", True), ("http://www.BAD.example", True), ("https://notbad.example/", False),
        ("https://ok.example/bad/page?x=1", True), ("https://ok.example/badly", False), ("bad.example/x", True),
        ("https://ok.example/?u=bad.example", False), ("https://bad.example:8080/", True),
    ],
)  # fmt: skip
def test_blocked_hosts_and_paths(tmp_path, url, blocked):
    (tmp_path / "list.txt").write_text("# hosts\nbad.example\nhttps://ok.example/bad/ # and a path\n\n")
    assert UrlCheck(tmp_path / "list.txt")(url) == ("blocked_url" if blocked else None)


def test_overlap_with_a_test_set_drops_a_document():
    rng = random.Random(0)
    question, other = sentence(rng, 20), sentence(rng, 12)
    check = ContaminationCheck({"short": ["too short to look for"], "exam": [question, other]}, 13)
    words = question.split()
    assert check(f"x {' '.join(words[3:16]).upper()}, y") == "contaminated_exam"
    assert check(f"{sentence(rng, 400)} {', '.join(words[:13])}") == "contaminated_exam"
    assert check(" ".join(words[:12])) is None
    assert check(" ".join([*words[:6], "between", *words[6:12]])) is None
    assert check(other) is None
    assert check("too short to look for") is None


def near_texts() -> tuple[str, str, str]:
    words = sentence(random.Random(3), 300).split()
    changed = [*words[:150], "changed", *words[151:]]
    return " ".join(words), " ".join(changed), sentence(random.Random(4), 300)


def test_bands_of_near_texts_meet_and_of_others_do_not():
    sign = Signer(Banding(ngram_words=5, bands=14, rows=8, seed=1))
    text, near, other = (sign(text) for text in near_texts())
    assert (text == near).any()
    assert not (text == other).any()
    assert np.array_equal(sign(near_texts()[0]), text)
    assert sign("one").shape == (14,)


def test_near_duplicates_go_over_all_sources_and_the_first_stays(tmp_path):
    make_corpus(tmp_path, dedup={"near": {"enabled": True}}, pipeline={"task_bytes": 4000})
    text, near, other = near_texts()
    third = near.replace("changed", "altered")
    write_lines(tmp_path / "sources" / "web.jsonl", [other, near])
    write_lines(tmp_path / "sources" / "code.jsonl", [text, text + " "])
    write_lines(tmp_path / "sources" / "math.jsonl", [third, sentence(random.Random(9), 50)])
    context = context_of(tmp_path)
    download_raw.run(context)
    report = clean.run(context)["sources"]
    assert report["web"]["dropped"] == {}
    # The second of code equals the first, which is near the second of web: it counts as equal.
    assert report["code"]["dropped"] == {"duplicate": 1, "near_duplicate": 1}
    assert report["math"]["dropped"] == {"near_duplicate": 1}
    assert [source["kept"] for source in report.values()] == [2, 0, 1]


def test_bands_are_compared_beside_a_piece_that_kept_no_document(tmp_path):
    pieces = [[], [b"a" * 32, b"b" * 32], [], [b"c" * 32]]
    bands = [[], [[1, 5], [2, 6]], [], [[3, 6]]]
    paths = tuple(tmp_path / f"{index}.idx" for index in range(4))
    for path, digests, own in zip(paths, pieces, bands, strict=True):
        write_digests(path, digests, 4, np.array(own, np.uint64).reshape(-1, 2))
    outputs = [tmp_path / f"links-{band}.idx" for band in range(2)]
    for band, output in enumerate(outputs):
        CompareBand(paths, band, output).run()
    assert linked_documents(outputs, 3).tolist() == [False, False, True]
    CompareBand(paths[:1], 0, outputs[0]).run()
    assert linked_documents(outputs[:1], 0).tolist() == []


PAGE = """<html><head><title>T</title><style>p{}</style></head><body><nav>Home</nav><script>x()</script>
<main><h1>Tides &amp; moons</h1><p>The  sea <b>rises</b><br>twice.</p><pre>
for x in y:
    print(x)
</pre><ul><li>one<li>two</ul></main><footer>(c)</footer></body></html>"""
PAGE_TEXT = "Tides & moons\n\nThe sea rises\ntwice.\n\nfor x in y:\n    print(x)\n\none\n\ntwo"


def test_the_text_of_a_page_is_its_content():
    assert text_of_html(PAGE) == PAGE_TEXT
    assert text_of_html("") == ""
    assert text_of_html("plain <text") == "plain"


def test_html_is_read_from_files_and_from_fields(tmp_path):
    make_corpus(tmp_path)
    (tmp_path / "a.html").write_text(PAGE)
    write_lines(tmp_path / "b.jsonl", [PAGE])
    files = {"id": "files", "weight": 0.5, "files": [str(tmp_path / "a.html")]}
    field = {"id": "field", "weight": 0.5, "files": [str(tmp_path / "b.jsonl")], "html": True}
    edit_yaml(tmp_path / "mixture.yaml", sources=[files, field])
    context = context_of(tmp_path)
    download_raw.run(context)
    report = clean.run(context)["sources"]
    assert report["field"]["dropped"] == {"duplicate": 1}
    (line,) = (tmp_path / "data" / "clean" / "files" / "data.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == PAGE_TEXT


@pytest.mark.parametrize(
    ("licence", "kept"),
    [("MIT", True), (["mit", "Apache-2.0"], True), (["MIT", "GPL-3.0"], False), ([], False), (None, False), (3, False)],
)
def test_only_allowed_licences_are_kept(licence, kept):
    fields = Fields("text", None, "", licence_field="licenses", licences=("mit", "apache-2.0"))
    document = document_of({"text": "x", "licenses": licence}, "here", fields)
    assert (document.text, document.reason) == (("x", None) if kept else (None, "licence"))


def test_the_order_of_checks_and_what_is_counted(tmp_path):
    from collections import Counter

    (tmp_path / "list.txt").write_text("bad.example")
    rules = CleanRules(
        5, 400, PLAIN, 256, language="en", blocked_urls=tmp_path / "list.txt", redact_emails=True, redact_ips=True
    )
    cleaner, counts = Cleaner(rules), Counter()
    english = "The boats went out early, says a@b.org, from\x07 8.8.8.8."
    for url, text, reason in (
        ("https://bad.example/", english, "blocked_url"), ("https://fine.example/", english, None),
        (None, "a", "too_short"), (None, "Il faisait beau et les bateaux sont sortis.", "language"),
    ):  # fmt: skip
        assert cleaner(Document("x", text, url=url), counts)[1] == reason
    assert counts == {"changed.control_removed": 1, "changed.emails_redacted": 1, "changed.ips_redacted": 1}
    assert cleaner(Document("x", english), counts)[0] == (
        "The boats went out early, says name@example.com, from 192.0.2.1."
    )
