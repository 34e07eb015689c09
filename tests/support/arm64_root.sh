#!/usr/bin/env bash
# arm64_root.sh FOLDER: a Python for 64-bit Arm that runs under qemu-user, as FOLDER/python.
#
# Its packages are Debian's (of the release that runs here) and, in the versions installed in this
# Python, PyPI's. Needs qemu-aarch64-static, apt-get and pip; nothing is installed.
set -euo pipefail
mkdir -p "$1" && cd "$1"
mkdir -p lists/partial cache/archives/partial root wheels site
: > status
apt=(apt-get -qq -oAPT::Architecture=arm64 -oAPT::Architectures=arm64 -oAPT::Sandbox::User=root
     -oDir::State::Lists="$PWD/lists" -oDir::State::status="$PWD/status" -oDir::Cache="$PWD/cache")
"${apt[@]}" update
"${apt[@]}" install -y --download-only --no-install-recommends python3-minimal libpython3-stdlib libstdc++6
for package in cache/archives/*.deb; do dpkg -x "$package" root; done
python=$(basename "$(readlink -f root/usr/bin/python3)")

names='numpy|ml[-_]dtypes|tokenizers|sentencepiece|jinja2|markupsafe|gguf'
needed=$(python3 -m pip list --format=freeze 2>/dev/null | grep -iE "^($names)==")
platforms=$(for n in 17 24 26 27 28 31 34 35; do echo "--platform manylinux_2_${n}_aarch64"; done)
# shellcheck disable=SC2086
python3 -m pip download -q -d wheels --no-deps --only-binary=:all: --implementation cp \
    --python-version "${python#python}" --platform manylinux2014_aarch64 $platforms $needed
for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" site; done
for name in numba llvmlite; do  # found, but never imported
    mkdir -p "site/$name"
    echo "raise ImportError('kernels are compiled by another process')" > "site/$name/__init__.py"
done
cat > python << END
#!/bin/sh
export PYTHONPATH="$PWD/site:\$PYTHONPATH" PYTHONDONTWRITEBYTECODE=1
exec qemu-aarch64-static -L "$PWD/root" "$PWD/root/usr/bin/$python" "\$@"
END
chmod +x python
rm -rf cache wheels lists
