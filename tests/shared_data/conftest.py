"""Fixtures of the pipeline's tests."""

import pytest
from pipeline_corpus import context_of, make_corpus, run_all


@pytest.fixture(scope="session")
def done(tmp_path_factory):
    """A corpus that went through all stages in one process; the tests only read it."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    context = context_of(folder)
    return folder, context, run_all(context)


@pytest.fixture
def fresh(tmp_path):
    make_corpus(tmp_path)
    return tmp_path
