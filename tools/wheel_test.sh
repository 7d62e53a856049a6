#!/bin/sh
# Build the wheel, install it into a clean environment and use it away from the repository.
# usage: tools/wheel_test.sh PYTHON    (PYTHON's environment has the dependencies; only the package is new)
set -eu
python=$1
root=$(cd "$(dirname "$0")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$scratch/dist" "$root"
"$python" -m venv "$scratch/venv"
# The dependencies are gigabytes: borrow them from PYTHON's environment, but not the package itself.
site=$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/dependencies.pth"
"$scratch/venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --force-reinstall "$scratch"/dist/*.whl
cp -r "$root/examples/quickstart/draft" "$scratch/draft"
cd "$scratch"
venv/bin/eagle3pack --version
venv/bin/python - "$site" <<'CHECK'
import pathlib, sys
import eagle3pack
from eagle3pack.documents import load_schema
from eagle3pack.draft.target import bundled_target
from eagle3pack.engine.prompts import shipped_prompts
assert pathlib.Path(eagle3pack.__file__).is_relative_to(sys.argv[1]), eagle3pack.__file__
for schema in pathlib.Path(eagle3pack.__file__).with_name("schemas").glob("*.schema.json"):
    load_schema(schema.name.removesuffix(".schema.json"))
    print("schema", schema.name)
print("prompts", len(shipped_prompts().prompts), "target", bundled_target("MiniMaxAI/MiniMax-M3").architecture)
CHECK
venv/bin/eagle3pack convert draft gqa --num-kv-heads 4 -q
test -s gqa/eagle3pack.json
venv/bin/eagle3pack verify gqa --quick > report.txt
echo "the wheel works"
