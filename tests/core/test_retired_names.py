"""Names that were replaced by the field's terms must not come back."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("graphllm", "models", "tests", "benchmarks", "docs")
SUFFIXES = {".py", ".cu", ".cuh", ".js", ".css", ".html", ".md"}
# Regular expression of a retired name -> the name in use.
RETIRED = {
    r"\bmeeting(s)?\b": "barrier",
    r"\bstep_walk\b|\bwalk\.py\b|\b_walk\b": "step_interpreter",
    r"\bteam\b|\bTEAM\b": "thread pool",
    r"\btickets?\b": "chunk",
    r"\bthreads_for\b": "thread_count",
    r"\bpeaks_cpu\b|\bpeaks\.py\b": "probe_kernels, roofline_cpu",
    r"\brates\.py\b|\bkernel_rates\b": "kernel_probes",
    r"\bceilings\.py\b|\bceiling\.py\b|\bceiling_tensor\b": "roofline, roofline_probes",
    r"\blayouts\.(py|cu)\b": "weight_packing",
    r"\blinear_(some|many|ragged|tensor)\b": "small_batch, gemm, gemv_unaligned",
    r"\bexperts_(few|many|ragged)\b": "experts_gemv, experts_gemm, experts_unaligned",
    r"\bstamps\b|\bStamps\b": "timestamps",
    r"\bruntime\.library\b|\blibrary\.py\b": "cublaslt",
    r"\bprofiler\.(sides|turns|timed|match|closing|noise|spans)\b": "what they contain",
    r"\b(sides|turns|timed|match|closing|noise|spans|disturbance)\.py\b": "what they contain",
    r"\blatent\.py\b|\bmodel\.latent\b": "mla",
    r"\bmixture\.py\b|\bmodel\.mixture\b": "moe",
    r"\brotary\.py\b|\bmodel\.rotary\b": "rope",
    r"\bllm\.fit\b|\bengine\.fit\b|\bfit\.py\b|\bFit\b": "gpu_offload, GpuOffload",
    r"\bRepeat\b(?=[(`\],]|$)|\bexecutor\.repeat\b|\brepeat\.py\b": "DecodeLoop, decode_loop",
    r"\bFamily\b|\bfamily\.py\b|\bmodel\.family\b": "model spec",
    r"\bstarter\b": "scaffold",
    r"\bhost\.py\b|\bgraphllm\.host\b": "system_info",
    r"\bcanar(y|ies)\b|\bpoison=": "buffer guards",
    r"\bSite\b|\bSpot\b": "KernelContext, OperandRef",
    r"\bbrains\b": "bf16 values",
    r"\bendless\b": "infinite or NaN",
    r"\bfurther\b(?=[\s]*[=:(])": "mtp_layers",
    r"\bmagnitude=|[\"\x27]magnitude[\"\x27]": "attention_factor",
    r"\bDrawing\b(?! of)": "sampling",
    r"\busual\b(?=[\s]*[=(,)])": "default",
    r"\bfar\.py\b|\blate\.py\b|\bFarDevice\b|\bLateDevice\b": "remote_memory, lazy_device",
    r"\bMeasured\b(?=[(\[.`])": "ProbeResults",
    r"\bOthers\b(?=[(`])": "OtherProcesses",
    r"\bmoved_over\b|\bmade_by\b|\borigin_here\b|\bshown_line\b|\bmade_at\b": "see graph, ops",
    r"\bwhole_number\b|\bby_text\b": "as_int, mapping",
    r"\bmodel_file\.py\b|\bModelFile\b(?!Error)": "Checkpoint",
    r"\bspm(_model)?\.py\b|\bhard_texts\b": "sentencepiece, edge_cases",
    r"\b(attention|softmax|float|integer)_ir\b": "*_vectors, linear_float, linear_integer",
    r"\bdiskcache\b|\bmaths\.py\b|\bencode(_k)?\.py\b": "kernel_cache, math, quantize_weights",
    r"\bClosing\b(?=[(`\[])|\bRoof(s)?\b|\bStretch\b|\bParting\b": "see graphllm.profiler",
    r"\brequantise\b": "quantize_on_load",
    r"\bgraphllm/generation\b|\bgraphllm\.generation\b": "engine",
    r"\bcompare_noise\b|\bprofile_closes\b|\bquantise_cpu\b": "see benchmarks",
    r"\bin_turns\b|\bClosing\b(?=[(\[.`])|\bRoofs\b|\bParting\b": "see profiler, validation",
}


def sources() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    return sorted(p for p in found if p != Path(__file__).resolve())


def test_no_retired_name_is_used():
    # A plain search for the letters of a pattern is much faster than the pattern itself.
    patterns = [
        (re.compile(pattern), re.findall(r"\w{3,}", re.sub(r"\\.", " ", pattern)), name)
        for pattern, name in RETIRED.items()
    ]
    found = []
    for path in sources():
        text = path.read_text("utf-8")
        for pattern, words, name in patterns:
            if any(word in text for word in words):
                for match in pattern.finditer(text):
                    where = f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
                    found.append(f"{where}: {match[0]!r} is retired; use {name}")
    assert not found, "\n".join(found)
