"""python -m gpt_oss_lite: the same as the command gpt-oss-lite."""

try:
    from gpt_oss_lite.cli import main
except ModuleNotFoundError as missing:
    from shared_data.errors import leave_without

    leave_without(missing)

main()
