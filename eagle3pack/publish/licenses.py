"""License ids as each hub spells them. There is no default: undeclared, nothing is published."""

from __future__ import annotations

# huggingface/hub-docs, model card metadata, August 2026.
HUGGING_FACE = frozenset(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0
    bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc
    cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0
    cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0
    cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1
    eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c
    ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql
    ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license fair-noncommercial-research-license llama2
    llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown other
    """.split()  # noqa: SIM905
)
# modelscope_hub 0.5 constants.License: what the API takes when a repository is created.
MODELSCOPE_API = {
    "apache-2.0": "Apache-2.0",
    "mit": "MIT",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "gpl-2.0": "GPL-2.0",
    "gpl-3.0": "GPL-3.0",
    "lgpl-2.1": "LGPL-2.1",
    "lgpl-3.0": "LGPL-3.0",
    "mpl-2.0": "MPL-2.0",
    "cc-by-4.0": "CC-BY-4.0",
    "cc-by-sa-4.0": "CC-BY-SA-4.0",
    "cc-by-nc-4.0": "CC-BY-NC-4.0",
    "cc0-1.0": "CC0-1.0",
    "unlicense": "Unlicense",
}
# In a card ModelScope itself writes these two so; the rest as Hugging Face does.
MODELSCOPE_CARD = {"apache-2.0": "Apache License 2.0", "mit": "mit"}


def modelscope_api(license_id: str) -> str:
    """What ModelScope's API takes for a license."""
    return MODELSCOPE_API.get(license_id, "Other")


def modelscope_card(license_id: str) -> str:
    """What a card on ModelScope says for a license."""
    return MODELSCOPE_CARD.get(license_id, license_id)
