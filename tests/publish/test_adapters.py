"""The adapters: every exception of a client has one of ours, and an unknown client is refused at once."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3pack.errors import (
    Eagle3PackError,
    PermissionDenied,
    RefusedError,
    UsageError,
)
from eagle3pack.publish import huggingface, modelscope
from eagle3pack.publish.hub import MovedError, UnsettledError, redact, require_safe_endpoint


def http_error(kind: type[Exception], status: int, message: str = "no") -> Exception:
    """An HfHubHTTPError of any class, as the client makes it."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.server_message = message  # type: ignore[attr-defined]
    error.response = SimpleNamespace(status_code=status, headers={"Retry-After": "7"})  # type: ignore[attr-defined]
    return error


class TestHuggingFace:
    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            (400, RefusedError),
            (401, PermissionDenied),
            (403, PermissionDenied),
            (404, PermissionDenied),
            (408, UnsettledError),
            (409, MovedError),
            (412, MovedError),
            (413, RefusedError),
            (422, RefusedError),
            (429, UnsettledError),
            (500, UnsettledError),
            (502, UnsettledError),
            (503, UnsettledError),
            (504, UnsettledError),
        ],
    )
    def test_statuses(self, status: int, expected: type[Eagle3PackError]) -> None:
        from huggingface_hub.errors import HfHubHTTPError

        found = huggingface.explain(http_error(HfHubHTTPError, status), "committing")
        assert type(found) is expected
        if isinstance(found, UnsettledError):
            assert found.retry_after_s == 7

    def test_every_http_error_class_is_mapped(self) -> None:
        from huggingface_hub import errors

        classes = [
            kind
            for _, kind in inspect.getmembers(errors, inspect.isclass)
            if issubclass(kind, errors.HfHubHTTPError)
        ]
        assert len(classes) > 5
        for kind in classes:
            assert isinstance(huggingface.explain(http_error(kind, 403), "reading"), Eagle3PackError), kind

    def test_every_transport_error_class_is_mapped(self) -> None:
        """httpx in huggingface_hub 1, httpx2 in 2."""
        for name in ("httpx", "httpx2"):
            library = pytest.importorskip(name)
            for _, kind in inspect.getmembers(library, inspect.isclass):
                if issubclass(kind, library.TransportError):
                    error = kind.__new__(kind)
                    Exception.__init__(error, "lost")
                    assert isinstance(huggingface.explain(error, "committing"), UnsettledError), kind

    def test_other_errors(self) -> None:
        from huggingface_hub import errors

        cases: list[tuple[Exception, type[Eagle3PackError]]] = [
            (errors.LocalTokenNotFoundError("none"), PermissionDenied),
            (errors.OfflineModeIsEnabled("offline"), UsageError),
            (errors.HFValidationError("bad name"), UsageError),
            (ConnectionError("CAS error: 404"), UnsettledError),
            (ValueError("LFS batch API returned errors:\ntoo large"), RefusedError),
            (ValueError("Invalid metadata in README.md."), RefusedError),
        ]
        for error, expected in cases:
            assert type(huggingface.explain(error, "uploading")) is expected, error

    def test_our_own_faults_pass(self) -> None:
        assert huggingface.explain(TypeError("a bug"), "uploading") is None
        assert huggingface.explain(ValueError("a bug"), "uploading") is None

    def test_a_full_storage_is_no_question_of_login(self) -> None:
        from huggingface_hub.errors import HfHubHTTPError

        error = http_error(HfHubHTTPError, 403, "Private repository storage limit reached")
        found = huggingface.explain(error, "uploading")
        assert isinstance(found, RefusedError) and "storage" in str(found)


class TestModelScope:
    def test_every_error_class_is_mapped(self) -> None:
        from modelscope_hub import errors

        classes = [
            kind
            for _, kind in inspect.getmembers(errors, inspect.isclass)
            if issubclass(kind, errors.HubError)
        ]
        assert len(classes) > 10
        for kind in classes:
            error = kind("said")
            found = modelscope.explain(error, "committing")
            assert isinstance(found, Eagle3PackError), kind
            assert isinstance(found, UnsettledError) == bool(error.retryable), kind

    def test_requests_errors_are_transport(self) -> None:
        import requests

        assert isinstance(modelscope.explain(requests.ConnectionError("x"), "uploading"), UnsettledError)
        assert modelscope.explain(TypeError("a bug"), "uploading") is None

    def test_an_unknown_version_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import modelscope_hub

        monkeypatch.setattr(modelscope_hub, "__version__", "0.6.0")
        with pytest.raises(UsageError, match=r"0\.6\.0") as caught:
            modelscope.ModelScope("org/tiny")
        assert "pip install" in caught.value.hint

    def test_a_function_that_changed_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from modelscope_hub._legacy_api import LegacyClient

        def upload_blob(self: Any, url: str) -> None:
            """Other arguments than we give."""

        monkeypatch.setattr(LegacyClient, "upload_blob", upload_blob)
        with pytest.raises(UsageError, match="lacks upload_blob"):
            modelscope.ModelScope("org/tiny")


@pytest.mark.parametrize(
    ("endpoint", "safe"),
    [
        ("https://huggingface.co", True),
        ("http://localhost:8000", True),
        ("http://127.0.0.1", True),
        ("http://hub.example.org", False),
        ("http://localhost.example.org", False),
        ("ftp://hub.example.org", False),
    ],
)
def test_credentials_go_over_https_or_loopback(endpoint: str, safe: bool) -> None:
    if safe:
        assert require_safe_endpoint(endpoint + "/") == endpoint
    else:
        with pytest.raises(UsageError, match="clear text"):
            require_safe_endpoint(endpoint)


def test_messages_hold_no_credentials() -> None:
    said = (
        "PUT https://s3.example.org/a?X-Amz-Signature=abc with Bearer xyz, hf_abcdefghijkl and "
        "ms-12345678-1234-1234-1234-123456789abc, m_session_id=q"
    )
    clean = redact(said)
    for secret in ("abc", "xyz", "hf_", "ms-1", "Signature", "=q"):
        assert secret not in clean
