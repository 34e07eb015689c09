"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny_models as tiny

COMMAND = [sys.executable, "-m", "graphllm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "tiny.gguf"
    return str(tiny.write_llama(path, tiny.llama_weights()))


def call(*words: str, **options) -> subprocess.CompletedProcess:
    done = subprocess.run([*COMMAND, *words], capture_output=True, timeout=120, **options)
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done


def test_json_has_everything(model):
    done = call("run", model, "-p", "hello", "-n", "4", "--temp", "0", "--ignore-eos", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert len(result["tokens"]) == 4 and result["finish_reason"] == "length"
    assert result["prompt_tokens"] > 0 and result["device"] == "cpu"
    assert set(result["timings"]) == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert set(result["placement"]) == {"cpu"} and result["fallbacks"] == []


def test_text_begins_with_the_prompt_and_repeats_with_the_seed(model):
    ask = ("run", model, "-p", "hello", "-n", "6", "--ignore-eos", "-s")
    a, b, c = call(*ask, "5"), call(*ask, "5"), call(*ask, "6")
    assert a.stdout.startswith("hello") and a.stdout == b.stdout != c.stdout


def test_prompt_from_file_and_standard_input(model, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("hello")
    rest = ("-n", "3", "--temp", "0", "--ignore-eos")
    direct = call("run", model, "-p", "hello", *rest).stdout
    assert call("run", model, "-f", str(file), *rest).stdout == direct
    assert call("run", model, "-p", "-", *rest, input=b"hello").stdout == direct


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nothing.gguf", "-p", "x"], "nothing.gguf: no such file"),
        (["run", "MODEL"], "give a prompt"),
        (["run", "MODEL", "-p", "x", "--temp", "-1"], "temperature = -1.0 must be at least 0"),
        (["run", "MODEL", "-p", "x", "--top-p", "0"], "top_p = 0.0 must be in (0, 1]"),
        (["run", "MODEL", "-p", "x", "-c", "0"], "context = 0 must be at least 1"),
        (["run", "MODEL", "-p", "x", "-t", "-2"], "threads = -2 must be at least 0"),
        (["run", "MODEL", "-p", "x", "--device", "abacus"], "unknown backend 'abacus'"),
        (["run", "MODEL", "-p", "x", "--kv-type", "q3"], "kv_type = 'q3' must be f32 or f16"),
        (["run", "MODEL", "-p", "x", "--place", "abc"], "must be PATTERN=BACKEND"),
        (["run", "MODEL", "-f", "none.txt"], "none.txt: No such file"),
        (["profile", "MODEL", "--by", "colour"], "--by colour must be one of op, scope"),
        (["inspect", os.devnull], os.devnull),
    ],
)
def test_an_error_is_one_line(model, words, message):
    done = call(*[model if w == "MODEL" else w for w in words])
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_wrong_usage_is_exit_code_2(model):
    assert call("run").returncode == 2
    assert call("run", model, "--temperatur", "1").returncode == 2


def test_invalid_utf8_is_named(model):
    done = call("run", model, "-p", "-", input=b"ab\xff")
    assert done.returncode == 1 and "byte 2 is not valid UTF-8" in done.stderr


def test_fallbacks_are_told_and_strict_refuses_them(model):
    pin = ("--place", "model.layers.1.*=reference")
    done = call("run", model, "-p", "hello", "-n", "2", "--temp", "0", *pin)
    assert done.returncode == 0
    assert "ran on reference" in done.stderr and "pinned by model.layers.1.*" in done.stderr
    done = call("run", model, "-p", "hello", "--strict", *pin)
    assert done.returncode == 1 and "strict placement forbids it" in done.stderr


def test_profile_and_inspect_and_doctor(model):
    table = call("profile", model, "-n", "4").stdout
    assert "prefill:" in table and "decode: 4 tokens" in table and "linear f32" in table
    assert "between steps" in table
    shown = call("inspect", model).stdout
    assert "blk.2.ffn_down.weight" in shown and "llama.block_count = 3" in shown
    listed = json.loads(call("inspect", model, "--json").stdout)
    assert len(listed["tensors"]) == 30
    doctor = call("doctor").stdout
    assert "cpu " in doctor and "reference " in doctor


def test_a_closed_pipe_is_a_quiet_stop(model):
    process = subprocess.Popen(
        [*COMMAND, "run", model, "-p", "hello", "-n", "100", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0


@pytest.mark.realmodel
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_ctrl_c_stops_at_once_with_one_line(when, tmp_path):
    prompt = tmp_path / "prompt.txt"
    times = 380 if when == "prefill" else 1
    prompt.write_text("The quick brown fox jumps over the lazy dog. " * times)
    process = subprocess.Popen(
        [*COMMAND, "run", "demo", "-f", str(prompt), "-n", "4000", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "GRAPHLLM_DEBUG": ""},
    )  # fmt: skip
    process.stdout.read(10)  # the prompt is echoed when loading is done
    time.sleep(1.0)
    start = time.perf_counter()
    process.send_signal(signal.SIGINT)
    process.wait(20)
    seconds = time.perf_counter() - start
    assert process.returncode == 130
    assert process.stderr.read().decode().strip() == "interrupted"
    assert seconds < 2.0  # 0.3 s on an idle machine: see the closing of the team's tests


def test_importing_is_light():
    code = (
        "import sys, graphllm; bad = {'numba', 'llvmlite', 'cupy', 'torch'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
