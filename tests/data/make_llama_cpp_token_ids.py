"""Writes llama_cpp_token_ids.json: what llama.cpp makes of the texts in tokenizer_texts.json.

    pip install llama-cpp-python gguf     (in an environment of its own)
    python tests/data/make_llama_cpp_token_ids.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Besides the file's own way of splitting ("smollm"), the other supported ways are asked of copies of
its vocabulary whose `tokenizer.ggml.pre` says so: llama.cpp then splits by that rule, and merges
with the same merges.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp

SPLITTINGS = ("smollm", "gpt-2", "default", "llama-bpe", "qwen2")
TEXTS = Path(__file__).with_name("tokenizer_texts.json")


def with_splitting(path: Path, pre: str, directory: Path) -> Path:
    """Write a GGUF of the same vocabulary, and nothing else, that names another splitting."""
    reader = gguf.GGUFReader(path)
    copy = directory / f"{pre}.gguf"
    writer = gguf.GGUFWriter(copy, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = pre if field.name == "tokenizer.ggml.pre" else field.contents()
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=sub_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


def token_ids(path: Path, texts: dict[str, str]) -> dict[str, list[int]]:
    """Return llama.cpp's ids of every text, without the begin token."""
    model = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    return {
        name: model.tokenize(text.encode(), add_bos=False, special=True)
        for name, text in texts.items()
    }


def main() -> None:
    path = Path(sys.argv[1])
    texts = json.loads(TEXTS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory:
        ids = {
            pre: token_ids(with_splitting(path, pre, Path(directory)), texts) for pre in SPLITTINGS
        }
    assert ids["smollm"] == token_ids(path, texts), "the copy of the vocabulary is faithful"
    content = {
        "made_by": f"llama-cpp-python {llama_cpp.__version__}",
        "vocabulary": path.name,
        "ids": ids,
    }
    out = Path(__file__).with_name("llama_cpp_token_ids.json")
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    out.write_text(text.replace('],"', '],\n"').replace('":{', '":{\n') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
