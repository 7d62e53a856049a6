"""The command and environment of a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.errors import UsageError
from eagle3pack.sources import Location
from eagle3pack.verify.smoke.engines import served_target
from eagle3pack.verify.smoke.installation import Installation
from eagle3pack.verify.smoke.launch import (
    EngineOptions,
    Launch,
    core_lists,
    kv_cache_gib,
    parse_engine_args,
    plan_launch,
)

GPU = Installation(("vllm", "serve"), "0.32.0", cpu_build=False, counts_requests=True)
CPU = Installation(("vllm", "serve"), "0.32.0", cpu_build=True, counts_requests=True)


def plan(
    installation: Installation = GPU,
    target: Location = Location("local", "/models/target"),  # noqa: B008
    draft: Path | None = Path("/models/draft"),
    options: EngineOptions = EngineOptions(),  # noqa: B008
    size: int = 4,
) -> Launch:
    return plan_launch(
        installation,
        target,
        draft,
        options,
        tensor_parallel_size=size,
        num_speculative_tokens=3,
        port=8123,
        model_name="name",
    )


def value_after(launch: Launch, option: str) -> str:
    return launch.command[launch.command.index(option) + 1]


def test_the_command_for_four_gpus() -> None:
    launch = plan()
    assert launch.command[:3] == ("vllm", "serve", "/models/target")
    assert value_after(launch, "--tensor-parallel-size") == "4"
    assert value_after(launch, "--per-request-spec-decode-metrics") == "summary"
    assert json.loads(value_after(launch, "--speculative-config")) == {
        "method": "eagle3",
        "model": "/models/draft",
        "num_speculative_tokens": 3,
    }
    assert launch.environment == {}
    assert launch.notes == ()


def test_everything_is_passed_on() -> None:
    extra = parse_engine_args(
        [
            "gpu-memory-utilization=0.5",
            "--enable_expert_parallel=",
            "speculative-config.draft_tensor_parallel_size=1",
            "speculative-config.attention_backend=FLASH_ATTN",
        ]
    )
    launch = plan(options=EngineOptions(True, 4096, "bfloat16", "TRITON_ATTN", 128, extra))
    assert "--enforce-eager" in launch.command
    assert "--enable-expert-parallel" in launch.command
    for option, value in {
        "--max-model-len": "4096",
        "--dtype": "bfloat16",
        "--attention-backend": "TRITON_ATTN",
        "--block-size": "128",
        "--gpu-memory-utilization": "0.5",
    }.items():
        assert value_after(launch, option) == value
    config = json.loads(value_after(launch, "--speculative-config"))
    assert config["draft_tensor_parallel_size"] == 1
    assert config["attention_backend"] == "FLASH_ATTN"  # what is said last holds


def test_a_baseline_says_nothing_of_a_draft() -> None:
    launch = plan(draft=None)
    assert "--speculative-config" not in launch.command
    assert "--per-request-spec-decode-metrics" not in launch.command


def test_repositories_are_left_to_vllm() -> None:
    launch = plan(target=Location("ms", "org/model", "v1"))
    assert launch.command[2] == "org/model"
    assert value_after(launch, "--revision") == "v1"
    assert launch.environment == {"VLLM_USE_MODELSCOPE": "True"}


@pytest.mark.parametrize(
    "text",
    [
        "port=1",
        "model=x",
        "tensor_parallel_size=2",
        "--speculative-config={}",
        "=1",
        "enable-expert-parallel",
    ],
)
def test_what_is_ours_may_not_be_set(text: str) -> None:
    with pytest.raises(UsageError, match="--engine-arg"):
        parse_engine_args([text])


def test_a_cpu_build_gets_cores_and_memory_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    launch = plan(CPU)
    assert launch.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|0|1|1"
    assert int(launch.environment["VLLM_CPU_KVCACHE_SPACE"]) >= 1
    assert "VLLM_CPU_OMP_THREADS_BIND=0|0|1|1" in launch.notes[0]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in plan(CPU, size=1).environment


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3|4-7|8-11|12-15")
    launch = plan(CPU)
    assert launch.environment == {}
    assert launch.notes == ()


@pytest.mark.parametrize(
    ("cores", "ranks", "lists"),
    [
        ([0, 1], 4, "0|0|1|1"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 4, "0,1|2,3|4,5|6,7"),
        ([3], 2, "3|3"),
        ([0, 1, 2], 2, "0|1,2"),
        ([0, 1, 2], 4, "0|0|1|2"),
    ],
)
def test_core_lists(cores: list[int], ranks: int, lists: str) -> None:
    assert core_lists(cores, ranks) == lists


@settings(deadline=None, max_examples=100)
@given(cores=st.lists(st.integers(0, 200), min_size=1, max_size=64, unique=True), ranks=st.integers(1, 16))
def test_every_rank_has_a_core_and_no_core_is_idle(cores: list[int], ranks: int) -> None:
    cores = sorted(cores)
    lists = [[int(core) for core in part.split(",")] for part in core_lists(cores, ranks).split("|")]
    assert len(lists) == ranks
    assert all(lists)
    used = [core for part in lists for core in part]
    assert sorted(set(used)) == (
        cores if ranks >= len(cores) or len(used) == len(cores) else sorted(set(used))
    )
    if len(cores) >= ranks:
        assert used == cores


@pytest.mark.parametrize(
    ("gib", "ranks", "expected"), [(20, 1, 4), (20, 4, 1), (8, 1, 2), (1, 1, 1), (200, 4, 4)]
)
def test_kv_cache_space(gib: int, ranks: int, expected: int) -> None:
    assert kv_cache_gib(gib * 2**30, ranks) == expected


def test_vllm_serves_the_commit_that_was_examined(tmp_path: Path) -> None:
    assert served_target("hf:org/target", "c" * 40) == Location("hf", "org/target", "c" * 40)
    assert served_target("hf:org/target@main", "c" * 40) == Location("hf", "org/target", "c" * 40)
    assert served_target("org/target", "c" * 40) == Location("hf", "org/target", "c" * 40)
    assert served_target("hf:org/target@v1") == Location("hf", "org/target", "v1")
    assert served_target(str(tmp_path)) == Location("local", str(tmp_path))
