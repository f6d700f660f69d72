"""python -m gpt_oss_lite: the same as the command gpt-oss-lite."""

from gpt_oss_lite.cli import main

main()
