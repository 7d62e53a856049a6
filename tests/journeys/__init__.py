# ruff: noqa: E501  a row of a table is one line
"""What people go through with the tool, from one end to the other: one story a test.

| story | where it is told |
|---|---|
| an AngelSlim draft in a pickle; a sharded speculators draft; a config full of nulls | test_whole_way |
| the wrong target | test_wrong_target, tests/verify/test_faults (C18, A03, K11) |
| no network, or one that swallows everything | test_no_network, tests/test_sources, tests/publish/test_faults |
| a disk that fills | test_full_disk, tests/convert/test_broken_input, tests/checkpoint/test_folder |
| Ctrl-C, in every phase | test_interrupted, tests/verify/smoke/test_vllm, tests/integration/test_vllm |
| a killed run | tests/convert/test_broken_input, tests/publish/test_faults |
| nothing read but --help | test_help |
| the README alone | tests/integration/test_transcript, tests/test_examples, tools/wheel_test.sh |
| another Python | the suite itself, run with each that pyproject names |
| options that contradict each other | tests/convert/test_broken_input, tests/verify/smoke/test_request, tests/publish/test_options |
| broken files | tests/convert/test_broken_input, tests/verify/test_fuzz, tests/publish/test_folder |
"""
