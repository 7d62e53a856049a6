"""Publishing to both hubs with the real clients, when nothing goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from eagle3pack.documents import require_valid
from tests.publish.conftest import HF, MS, Place
from tests.publish.hubs.modelscope import PRIVATE, PUBLIC
from tests.tiny import target_config


def test_both_hubs_get_the_same_files_in_one_commit_each(place: Place) -> None:
    outcome = place.publish()
    assert outcome.code == 0, outcome.stderr
    assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2  # the hubs' own first one, and ours
    hf, ms = place.content(place.hf), place.content(place.ms)
    hf.pop(".gitattributes"), ms.pop(".gitattributes")
    assert set(ms) - set(hf) == {"configuration.json"}
    assert {path for path in hf if hf[path] != ms[path]} == {"README.md"}
    for path in place.draft.iterdir():
        if path.name != "training_state.pt":
            assert hf[path.name] == path.read_bytes()
    assert "training_state.pt" not in hf
    assert outcome.stdout.splitlines()[-2:] == [
        f"{place.hf.endpoint}/org/tiny/commit/{place.hf_commits[0].oid}",
        f"{place.ms.endpoint}/models/org/tiny/files",
    ]


def test_a_hub_holds_its_staging_folder_byte_for_byte(place: Place) -> None:
    assert place.publish("--render-to", "out").code == 0
    for kind, hub in (("hf", place.hf), ("ms", place.ms)):
        there = place.content(hub)
        for path in (place.root / "out" / kind).iterdir():
            assert there[path.name] == path.read_bytes(), path


def test_a_second_run_sends_nothing(place: Place) -> None:
    assert place.publish().code == 0
    puts, posts = place.puts(), place.hf.count("POST", "/commit/") + place.ms.count("POST", "/commit/")
    outcome = place.publish()
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr.count("unchanged") == 2
    assert place.puts() == puts
    assert place.hf.count("POST", "/commit/") + place.ms.count("POST", "/commit/") == posts


def test_blobs_are_at_both_hubs_before_either_commits(place: Place) -> None:
    times: list[str] = []
    for hub in (place.hf, place.ms):
        serve = hub.serve

        name = type(hub).__name__

        def watched(request, serve=serve, name=name):  # type: ignore[no-untyped-def]
            if request.method == "PUT" or "/commit/" in request.path:
                times.append(f"{name} {'commit' if '/commit/' in request.path else 'blob'}")
            return serve(request)

        hub.serve = watched  # type: ignore[method-assign]
    assert place.publish().code == 0
    first_commit = next(i for i, what in enumerate(times) if what.endswith("commit"))
    assert {what.split()[0] for what in times[:first_commit]} == {"HuggingFace", "ModelScope"}
    assert all(what.endswith("commit") for what in times[first_commit:])


def test_the_receipt_records_every_hub(place: Place) -> None:
    assert place.publish("--tag", "v1.0").code == 0
    receipt = json.loads((place.root / "receipt.json").read_text())
    require_valid(receipt, "receipt", where="receipt.json")
    assert [hub["status"] for hub in receipt["hubs"]] == ["done", "done"]
    assert all(hub["verified_at"] and hub["tag"] == "v1.0" for hub in receipt["hubs"])
    assert str(place.root) not in json.dumps(receipt)


def test_a_dry_run_plans_and_writes_nothing(place: Place) -> None:
    del place.env["HF_TOKEN"], place.env["MODELSCOPE_API_TOKEN"]
    outcome = place.publish("--dry-run", "--json")
    assert outcome.code == 0, outcome.stderr
    plans = outcome.document["hubs"]
    assert [plan["exists"] for plan in plans] == [False, False]
    assert {"path", "size", "sha256"} == set(plans[0]["changes"][0])
    for hub in (place.hf, place.ms):
        assert {seen.method for seen in hub.log} <= {"GET", "POST"}
        assert all(seen.path == "/api/validate-yaml" for seen in hub.log if seen.method == "POST")
    assert not (place.root / "receipt.json").exists()


def test_offline_asks_no_hub(place: Place) -> None:
    assert place.publish("--dry-run", "--offline").code == 0
    assert not place.hf.log and not place.ms.log


def test_without_a_terminal_it_needs_yes(place: Place) -> None:
    outcome = place.publish(yes=False)
    assert outcome.code == 2 and "--yes" in outcome.stderr
    assert not place.hf.log


class TestVisibility:
    def test_new_repositories_are_private(self, place: Place) -> None:
        assert place.publish().code == 0
        assert place.hf.repos["org/tiny"].private
        assert place.ms.repos["org/tiny"].visibility == PRIVATE
        assert place.ms.repos["org/tiny"].license == "MIT"

    def test_public_comes_last_on_hugging_face(self, place: Place) -> None:
        assert place.publish("--public").code == 0
        assert not place.hf.repos["org/tiny"].private
        assert place.ms.repos["org/tiny"].visibility == PUBLIC
        paths = [seen.path for seen in place.hf.log]
        settings = paths.index("/api/models/org/tiny/settings")
        assert settings > max(i for i, path in enumerate(paths) if "/commit/" in path)

    def test_a_private_modelscope_repository_cannot_be_made_public(self, place: Place) -> None:
        assert place.publish(to=(MS,)).code == 0
        outcome = place.publish("--public")
        assert outcome.code == 6 and "settings page" in outcome.stderr
        assert not place.hf_commits  # nothing was sent anywhere

    def test_it_stays_as_it_is_without_public(self, place: Place) -> None:
        assert place.publish("--public").code == 0
        (place.draft / "LICENSE").write_text("MIT, again\n")
        assert place.publish().code == 0
        assert not place.hf.repos["org/tiny"].private


class TestTags:
    def test_a_tag_names_the_commit(self, place: Place) -> None:
        assert place.publish("--tag", "v1").code == 0
        assert place.hf.repos["org/tiny"].tags == {"v1": place.hf_commits[0].oid}
        assert place.ms.repos["org/tiny"].tags["v1"] is place.ms_commits[0]
        assert place.publish("--tag", "v1").code == 0

    def test_a_tag_of_other_files_is_a_conflict_before_anything_is_sent(self, place: Place) -> None:
        assert place.publish("--tag", "v1").code == 0
        (place.draft / "LICENSE").write_text("MIT, again\n")
        outcome = place.publish("--tag", "v1")
        assert outcome.code == 5 and "v1" in outcome.stderr
        assert len(place.hf_commits) == 2

    def test_a_tag_may_come_later(self, place: Place) -> None:
        assert place.publish().code == 0
        assert place.publish("--tag", "v1").code == 0
        assert place.hf.repos["org/tiny"].tags == {"v1": place.hf_commits[0].oid}


class TestCard:
    def test_a_foreign_readme_is_kept(self, place: Place) -> None:
        assert place.publish().code == 0
        for hub in (place.hf, place.ms):
            hub.write_as_someone_else("org/tiny", "README.md", b"# Mine\n")
        (place.draft / "LICENSE").write_text("MIT, again\n")
        outcome = place.publish()
        assert outcome.code == 0 and outcome.stderr.count("was not written by this tool") == 2
        assert place.content(place.hf)["README.md"] == place.content(place.ms)["README.md"] == b"# Mine\n"
        assert place.content(place.hf)["LICENSE"] == b"MIT, again\n"

    def test_unless_it_is_to_be_replaced(self, place: Place) -> None:
        assert place.publish().code == 0
        place.hf.write_as_someone_else("org/tiny", "README.md", b"# Mine\n")
        assert place.publish("--replace-card", to=(HF,)).code == 0
        assert b"eagle3pack:card" in place.content(place.hf)["README.md"]

    def test_our_own_card_is_replaced_by_a_newer_one(self, place: Place) -> None:
        assert place.publish().code == 0
        before = place.content(place.hf)["README.md"]
        settings = place.root / "publish.yaml"
        settings.write_text(settings.read_text().replace("A tiny draft", "A small draft"))
        assert place.publish().code == 0
        after = place.content(place.hf)["README.md"]
        assert before != after and b"A small draft" in after
        assert len(place.hf_commits) == 3

    def test_a_published_card_can_be_checked_by_anyone(self, place: Place) -> None:
        assert place.publish().code == 0
        copy = place.root / "draft"
        (copy / "README.md").write_bytes(place.content(place.hf)["README.md"])
        assert place.publish("--check-card").code == 0
        (copy / "README.md").write_text((copy / "README.md").read_text().replace("2.669", "2.969"))
        outcome = place.publish("--check-card")
        assert outcome.code == 3 and "2.969" in outcome.stderr


class TestPullRequest:
    def test_it_proposes_the_commit(self, place: Place) -> None:
        assert place.publish(to=(HF,)).code == 0
        (place.draft / "LICENSE").write_text("MIT, again\n")
        outcome = place.publish("--pr", to=(HF,))
        assert outcome.code == 0, outcome.stderr
        assert outcome.stdout.strip().endswith("/org/tiny/discussions/1")
        assert len(place.hf_commits) == 2

    def test_the_same_proposal_is_not_made_twice(self, place: Place) -> None:
        assert place.publish(to=(HF,)).code == 0
        (place.draft / "LICENSE").write_text("MIT, again\n")
        assert place.publish("--pr", to=(HF,)).code == 0
        assert place.publish("--pr", to=(HF,)).code == 0
        assert len(place.hf.repos["org/tiny"].pull_requests) == 1

    def test_modelscope_has_none(self, place: Place) -> None:
        assert place.publish("--pr").code == 2


def test_weights_of_another_draft_are_a_conflict_or_pruned(place: Place) -> None:
    assert place.publish(to=(HF,)).code == 0
    place.hf.write_as_someone_else("org/tiny", "model.safetensors", b"old")
    outcome = place.publish(to=(HF,))
    assert outcome.code == 5 and "model.safetensors" in outcome.stderr
    assert place.publish("--prune", to=(HF,)).code == 0
    assert "model.safetensors" not in place.hf_commits[0].files


def test_what_was_published_can_be_downloaded_and_verified(place: Place, tmp_path: Path) -> None:
    """The way round: verify, publish, fetch with the real clients, verify again."""
    (place.root / "target.json").write_text(json.dumps(target_config()))
    verified = place.runner.run(
        ["verify", "draft", "--target", "target.json", "--report", "report.json"], cwd=place.root, env={}
    )
    assert verified.code == 0, verified.stderr
    settings = place.root / "publish.yaml"
    settings.write_text(settings.read_text().replace("target:\n", "target:\n  measured_as: target.json\n"))
    assert place.publish("--allow-unverified", "no engine in this test").code == 0
    environment = os.environ | place.env
    for name in ("HF_HOME", "MODELSCOPE_HOME", "MODELSCOPE_CACHE"):
        environment[name] = str(tmp_path / name)
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    subprocess.run(
        [sys.executable, "-c", DOWNLOAD], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    digest = json.loads((place.root / "report.json").read_text())["draft"]["digest"]
    for name in ("from-hf", "from-ms"):
        argv = ["verify", name, "--target", str(place.root / "target.json"), "--json"]
        outcome = place.runner.run(argv, cwd=tmp_path, env={})
        assert outcome.code == 0, outcome.stderr
        assert outcome.document["draft"]["digest"] == digest
        assert outcome.document["passed"]
        argv = ["publish", ".", "--report", "report.json", "--to", f"{name[-2:]}:org/tiny", "--check-card"]
        argv += ["--allow-unverified", "no engine in this test"]
        assert place.runner.run(argv, cwd=tmp_path / name, env={}).code == 0


DOWNLOAD = """
import os
from huggingface_hub import snapshot_download
from modelscope_hub import HubApi
snapshot_download("org/tiny", endpoint=os.environ["HF_ENDPOINT"], local_dir="from-hf")
HubApi().download_repo("org/tiny", "model", local_dir="from-ms")
"""
