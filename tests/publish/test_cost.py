"""What publishing costs: how often a byte is read. benchmarks/publish_two_hubs.py measures the rest."""

from __future__ import annotations

from tests.publish import inputs
from tests.publish.conftest import HF, Place
from tests.tiny import native_config, write_draft


def test_weights_are_read_once_to_hash_and_once_a_hub(place: Place) -> None:
    folder = write_draft(place.root / "draft", native_config(vocab_size=80_000, draft_vocab_size=80_000))
    for shard in folder.glob("model-*"):
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    inputs.write_report(place.root / "report.json", inputs.report(folder))
    size = (folder / "model.safetensors").stat().st_size
    assert size > 20_000_000
    first = place.publish()
    assert first.code == 0, first.stderr
    slack = 0.2 * size  # everything else that is read: schemas, templates, certificates
    assert 3 * size <= first.read_bytes < 3 * size + slack
    again = place.publish()
    assert again.code == 0
    assert again.read_bytes < size + slack
    assert place.publish("--tag", "v1", to=(HF,)).read_bytes < size + slack
