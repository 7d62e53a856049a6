"""What goes wrong at the hubs, and how publishing ends: once, whole, and with the exit code that says so."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time

import pytest

from tests.publish.conftest import HF, MS, Place
from tests.publish.hubs.huggingface import READ_TOKEN
from tests.publish.hubs.server import Fault

COMMIT = "/commit/"
FOR_EVER = -1


class TestLostAnswers:
    def test_a_commit_whose_answer_was_lost_is_made_once(self, place: Place) -> None:
        for hub in (place.hf, place.ms):
            hub.faults.append(Fault("POST", COMMIT, drop="after"))
        outcome = place.publish()
        assert outcome.code == 0, outcome.stderr
        assert outcome.stderr.count("The answer was lost, but the commit had been made.") == 2
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2

    def test_an_error_after_the_commit_was_made_is_no_error(self, place: Place) -> None:
        """huggingface/datasets#7708: 500, yet the commit exists."""
        for hub in (place.hf, place.ms):
            hub.faults.append(Fault("POST", COMMIT, status=500, after=True))
        assert place.publish().code == 0
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2

    def test_a_dropped_request_is_sent_again(self, place: Place) -> None:
        for hub in (place.hf, place.ms):
            hub.faults.append(Fault("POST", COMMIT, drop="before"))
        assert place.publish().code == 0
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2

    def test_a_lost_answer_to_a_pull_request(self, place: Place) -> None:
        assert place.publish(to=(HF,)).code == 0
        (place.draft / "LICENSE").write_text("MIT, again\n")
        place.hf.faults.append(Fault("POST", COMMIT, drop="after"))
        assert place.publish("--pr", to=(HF,)).code == 0
        assert len(place.hf.repos["org/tiny"].pull_requests) == 1

    def test_a_lost_answer_to_a_tag(self, place: Place) -> None:
        place.hf.faults.append(Fault("POST", "/tag/", drop="after", times=1))
        place.ms.faults.append(Fault("POST", "/repo/tag", drop="after"))
        assert place.publish("--tag", "v1").code == 0
        assert set(place.hf.repos["org/tiny"].tags) == set(place.ms.repos["org/tiny"].tags) == {"v1"}


class TestRefusals:
    @pytest.mark.parametrize("status", [429, 503])
    def test_a_busy_hub_is_asked_again(self, place: Place, status: int) -> None:
        """huggingface_hub#3186: the client does not repeat a commit."""
        for hub in (place.hf, place.ms):
            hub.faults.append(Fault("POST", COMMIT, status=status, headers={"Retry-After": "0"}, times=2))
        assert place.publish().code == 0
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2

    def test_a_hub_that_stays_busy_is_given_up_and_can_be_resumed(self, place: Place) -> None:
        place.hf.faults.append(Fault("POST", COMMIT, status=503, times=FOR_EVER))
        outcome = place.publish(to=(HF,))
        assert outcome.code == 7 and "Run the same command again" in outcome.stderr
        assert len(place.hf_commits) == 1
        puts = place.puts()
        place.hf.faults.clear()
        assert place.publish(to=(HF,)).code == 0
        assert len(place.hf_commits) == 2 and place.puts() == puts

    def test_a_412_for_ever_is_not_an_endless_loop(self, place: Place) -> None:
        """huggingface/datasets#7777: a token that may only open pull requests."""
        place.hf.faults.append(Fault("POST", COMMIT, status=412, body={"error": "moved"}, times=FOR_EVER))
        outcome = place.publish(to=(HF,))
        assert outcome.code == 5 and "--pr" in outcome.stderr

    def test_a_card_that_the_hub_refuses_costs_no_upload(self, place: Place) -> None:
        settings = place.root / "publish.yaml"
        settings.write_text(settings.read_text().replace("license: mit", "license: bsd"))
        outcome = place.publish(to=(HF,))  # our list knows bsd, the test hub's does not
        assert outcome.code == 6 and "license" in outcome.stderr
        assert not place.puts() and not place.hf_commits

    def test_a_validator_that_is_down_is_no_obstacle(self, place: Place) -> None:
        html = "<html>bad gateway</html>"
        place.hf.faults.append(Fault("POST", "/validate-yaml", status=502, body=html, times=2))
        assert place.publish(to=(HF,)).code == 0  # ours, and the one inside the client's create_commit
        assert len(place.hf_commits) == 2

    def test_a_rejected_commit_in_a_good_answer(self, place: Place) -> None:
        """ModelScope says Success: false with HTTP 200."""
        body = {"Code": 200, "Success": False, "Message": "policy", "Data": None}
        place.ms.faults.append(Fault("POST", COMMIT, status=200, body=body, times=FOR_EVER))
        outcome = place.publish(to=(MS,))
        assert outcome.code == 6 and "policy" in outcome.stderr

    def test_a_409_without_an_address(self, place: Place) -> None:
        """huggingface_hub#3279: KeyError 'url' on a repository that exists."""
        place.hf.faults.append(Fault("POST", "/repos/create", status=409, body={"error": "x"}, after=True))
        assert place.publish(to=(HF,)).code == 0


class TestAccess:
    def test_no_token(self, place: Place) -> None:
        del place.env["HF_TOKEN"]
        outcome = place.publish(to=(HF,))
        assert outcome.code == 4 and "hf auth login" in outcome.stderr
        del place.env["MODELSCOPE_API_TOKEN"]
        assert place.publish(to=(MS,)).code == 4

    def test_a_wrong_token_is_never_shown(self, place: Place) -> None:
        place.env["HF_TOKEN"] = secret = "hf_" + "w" * 34
        outcome = place.publish(to=(HF,))
        assert outcome.code == 4 and secret not in outcome.stdout + outcome.stderr
        place.env["MODELSCOPE_API_TOKEN"] = secret = "ms-99999999-1234-1234-1234-123456789abc"
        outcome = place.publish(to=(MS,))
        assert outcome.code == 4 and secret not in outcome.stdout + outcome.stderr

    def test_a_token_that_may_only_read(self, place: Place) -> None:
        place.env["HF_TOKEN"] = READ_TOKEN
        outcome = place.publish(to=(HF,))
        assert outcome.code == 4 and "write access" in outcome.stderr

    def test_no_credentials_travel_in_clear_text(self, place: Place) -> None:
        place.env |= {
            "HF_ENDPOINT": "http://hub.example.org",
            "MODELSCOPE_ENDPOINT": "http://hub.example.org",
        }
        for hub in (HF, MS):
            outcome = place.publish(to=(hub,))
            assert outcome.code == 2 and "clear text" in outcome.stderr

    def test_storage_hosts_get_no_credentials(self, place: Place) -> None:
        assert place.publish().code == 0
        blobs = [seen for hub in (place.hf, place.ms) for seen in hub.log if seen.method == "PUT"]
        stored = [seen for seen in blobs if seen.path.startswith("/storage/")]
        assert stored and all(seen.host == "127.0.0.1" for seen in stored)
        assert not any({"authorization", "cookie"} & set(seen.headers) for seen in stored)

    def test_the_hubs_own_storage_gets_them(self, place: Place) -> None:
        place.ms.own_storage = True
        assert place.publish(to=(MS,)).code == 0
        stored = [seen for seen in place.ms.log if seen.method == "PUT"]
        assert stored and all("authorization" in seen.headers for seen in stored)


class TestBlobs:
    def test_a_storage_that_fails_once(self, place: Place) -> None:
        for hub in (place.hf, place.ms):
            hub.faults.append(Fault("PUT", "/storage/", status=403))  # a signed address that expired
        assert place.publish().code == 0
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2

    def test_the_hubs_own_storage_fails_once(self, place: Place) -> None:
        place.ms.own_storage = True
        place.ms.faults.append(Fault("PUT", "/storage/", status=403))
        assert place.publish(to=(MS,)).code == 0

    def test_a_storage_that_always_fails_leaves_no_commit(self, place: Place) -> None:
        for hub in (place.hf, place.ms):
            hub.faults.append(Fault("PUT", "/storage/", status=403, times=FOR_EVER))
        outcome = place.publish()
        assert outcome.code == 7
        assert "Signature" not in outcome.stderr and "secret" not in outcome.stderr
        assert len(place.hf_commits) == 1 and len(place.ms_commits) == 1

    def test_an_object_that_the_hub_refuses(self, place: Place) -> None:
        body = {"objects": [{"oid": "0" * 64, "size": 1, "error": {"code": 413, "message": "too large"}}]}
        place.hf.faults.append(Fault("POST", "/objects/batch", status=200, body=body, times=FOR_EVER))
        outcome = place.publish(to=(HF,))
        assert outcome.code == 6 and len(place.hf_commits) == 1

    def test_a_blob_that_the_hub_forgot_is_noticed(self, place: Place) -> None:
        """modelscope#1397: the upload succeeds and nothing is there."""
        weights = next(place.draft.glob("*.safetensors"))
        place.ms.leaves_out.add(hashlib.sha256(weights.read_bytes()).hexdigest())
        outcome = place.publish(to=(MS,))
        assert outcome.code == 8 and weights.name in outcome.stderr


class TestOtherWriters:
    def test_a_commit_of_someone_else_is_a_conflict(self, place: Place) -> None:
        assert place.publish().code == 0
        (place.draft / "LICENSE").write_text("MIT, again\n")

        def intrude() -> None:
            place.hf.write_as_someone_else("org/tiny", "notes.txt", b"theirs")

        place.hf.faults.append(Fault("POST", COMMIT, act=intrude))
        outcome = place.publish(to=(HF,))
        assert outcome.code == 5 and "someone else" in outcome.stderr
        assert place.hf_commits[0].title == "by someone else"
        assert place.content(place.hf)["LICENSE"] == b"MIT\n"

    def test_on_modelscope_it_is_seen_just_before(self, place: Place) -> None:
        assert place.publish().code == 0
        (place.draft / "LICENSE").write_text("MIT, again\n")
        (place.draft / "NOTICE").write_bytes(b"x" * 70_000)  # a blob, so that there is a batch request

        def intrude() -> None:
            place.ms.write_as_someone_else("org/tiny", "notes.txt", b"theirs")

        place.ms.faults.append(Fault("POST", "/objects/batch", act=intrude))
        outcome = place.publish(to=(MS,))
        assert outcome.code == 5 and place.ms_commits[0].message == "by someone else"

    def test_on_modelscope_it_is_seen_just_after(self, place: Place) -> None:
        assert place.publish().code == 0
        (place.draft / "LICENSE").write_text("MIT, again\n")

        def intrude() -> None:
            place.ms.write_as_someone_else("org/tiny", "notes.txt", b"theirs")

        place.ms.faults.append(Fault("POST", COMMIT, act=intrude))
        outcome = place.publish(to=(MS,))
        assert outcome.code == 5 and "both commits stand" in outcome.stderr

    def test_files_that_change_meanwhile_are_not_committed(self, place: Place) -> None:
        weights = next(place.draft.glob("*.safetensors"))

        def touch() -> None:
            os.utime(weights)

        place.hf.faults.append(Fault("PUT", "/storage/", act=touch))
        outcome = place.publish(to=(HF,))
        assert outcome.code == 5 and "changed while" in outcome.stderr
        assert len(place.hf_commits) == 1


class TestOneHubOfTwo:
    def test_a_hub_that_refuses_its_commit(self, place: Place) -> None:
        place.ms.faults.append(Fault("POST", COMMIT, status=400, body={"Message": "no"}, times=FOR_EVER))
        outcome = place.publish()
        assert outcome.code == 9 and "Hugging Face has it, but ModelScope" in outcome.stderr
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 1
        receipt = json.loads((place.root / "receipt.json").read_text())
        assert [hub["status"] for hub in receipt["hubs"]] == ["done", "failed"]
        place.ms.faults.clear()
        assert place.publish().code == 0
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2

    def test_a_hub_that_is_down(self, place: Place) -> None:
        endpoint = place.env["MODELSCOPE_ENDPOINT"]
        place.env["MODELSCOPE_ENDPOINT"] = "http://localhost:1"
        outcome = place.publish()
        assert outcome.code == 9 and len(place.hf_commits) == 2
        place.env["MODELSCOPE_ENDPOINT"] = endpoint
        assert place.publish().code == 0
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2

    def test_both_down(self, place: Place) -> None:
        place.env |= {"MODELSCOPE_ENDPOINT": "http://localhost:1", "HF_ENDPOINT": "http://localhost:1"}
        for options in ((), ("--dry-run",)):
            outcome = place.publish(*options)
            assert outcome.code == 7 and "Traceback" not in outcome.stderr
            for hub in ("Hugging Face: ", "ModelScope: "):
                assert hub in outcome.stderr
            assert outcome.stderr.count("no connection to the hub") == 2
            assert "sent twice" not in outcome.stderr and "nothing was sent" in outcome.stderr


class TestKilled:
    def test_between_the_blobs_and_the_commit(self, place: Place) -> None:
        def kill() -> None:
            os.kill(place.runner.pid, signal.SIGKILL)

        for _ in range(2):
            place.hf.faults.append(Fault("POST", COMMIT, drop="before", act=kill))
            assert place.publish().code == -signal.SIGKILL
        assert len(place.hf_commits) == 1 and len(place.ms_commits) == 1
        sent = [seen.path for hub in (place.hf, place.ms) for seen in hub.log if seen.method == "PUT"]
        assert place.publish().code == 0
        again = [seen.path for hub in (place.hf, place.ms) for seen in hub.log if seen.method == "PUT"]
        assert again == sent  # no blob twice
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2
        # ModelScope's own template is no foreign card, even to the third run
        assert b"eagle3pack:card" in place.content(place.ms)["README.md"]

    def test_after_the_commit(self, place: Place) -> None:
        def kill() -> None:
            os.kill(place.runner.pid, signal.SIGKILL)

        place.ms.faults.append(Fault("POST", COMMIT, drop="after", act=kill))
        assert place.publish("--tag", "v1").code == -signal.SIGKILL
        assert place.publish("--tag", "v1").code == 0
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2
        assert "v1" in place.ms.repos["org/tiny"].tags


class TestInterrupted:
    @pytest.mark.parametrize(
        ("hub", "method", "path", "drop"),
        [
            ("hf", "GET", "/api/whoami", "before"),
            ("ms", "GET", "", "before"),
            ("hf", "PUT", "/storage/", "before"),
            ("ms", "PUT", "/storage/", "before"),
            ("hf", "POST", COMMIT, "before"),
            ("hf", "POST", COMMIT, "after"),
            ("ms", "POST", COMMIT, "after"),
        ],
    )
    def test_it_ends_at_once_and_the_same_command_finishes_it(
        self, place: Place, hub: str, method: str, path: str, drop: str
    ) -> None:
        def press_ctrl_c() -> None:
            os.kill(place.runner.pid, signal.SIGINT)
            time.sleep(0.3)  # the answer takes a while

        (place.hf if hub == "hf" else place.ms).faults.append(
            Fault(method, path, drop=drop, act=press_ctrl_c)
        )
        before = set(place.runner.scratch.iterdir())
        started = time.monotonic()
        outcome = place.publish()
        assert outcome.code == 130, outcome.stderr
        assert time.monotonic() - started < 20
        assert "Traceback" not in outcome.stderr and "interrupted" in outcome.stderr.splitlines()[-1]
        left = {path.name for path in place.root.iterdir()} - {"receipt.json"}
        assert left == {"draft", "publish.yaml", "report.json"}
        assert not [path for path in set(place.runner.scratch.iterdir()) - before if "publish" in path.name]
        assert place.publish().code == 0
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2
