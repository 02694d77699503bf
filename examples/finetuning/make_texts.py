"""Makes texts to pre-train and to fine-tune a GPT, from the files of Python's standard library on
this machine.

    python examples/finetuning/make_texts.py runs/texts

    library.jsonl     {"text": ...} for four of five files, for pre-training
    tokenizer.json    byte pairs like GPT-2's, 2048 tokens, learned from library.jsonl
    problems.csv      problem,solution: head and docstring of a function in the other files, and its
                      body; limited to about 256 tokens
    talks.jsonl       {"messages": [...]}: the same as conversations, the problem from a user, and
                      the solution from the assistant
    tokenizer_config.json   a chat template, which makes a conversation a text

It needs the library tokenizers (`pip install '.[text]'`).
"""

import argparse
import ast
import csv
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

VOCABULARY = 2048
LONGEST = 700  # characters of a problem with its solution
END = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
    + END
    + "\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# folders without library code, or with unusual code
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


def read_library() -> list[str]:
    """Return the text of each file of the standard library, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        file for file in root.rglob("*.py") if not LEFT_OUT & {*file.relative_to(root).parts}
    )
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [text for text in texts if text.strip()]


def find_problems(text: str) -> Iterator[tuple[str, str]]:
    """Yield the functions of a file with a docstring: head and docstring, and the body."""
    lines = text.splitlines()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            docstring_end, indent = node.body[0].end_lineno or 0, node.col_offset
            problem, solution = (
                "\n".join(line[indent:] for line in lines[first:last])
                for first, last in (
                    (node.lineno - 1, docstring_end),
                    (docstring_end, node.end_lineno),
                )
            )
            if solution.strip() and len(problem) + len(solution) <= LONGEST:
                yield problem, solution


def write_talks(folder: Path, problems: list[tuple[str, str]]) -> None:
    """Write problems and solutions as conversations, and the template that makes them texts."""
    with (folder / "talks.jsonl").open("w", encoding="utf-8") as file:
        for problem, solution in problems:
            talk = [
                {"role": "user", "content": problem},
                {"role": "assistant", "content": solution},
            ]
            file.write(json.dumps({"messages": talk}) + "\n")
    config = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    """Write the five files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for the files; made if it is missing")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    library = read_library()
    held_out = library[::5]
    texts = [text for number, text in enumerate(library) if number % 5]
    with (folder / "library.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    problems = [pair for text in held_out for pair in find_problems(text)]
    with (folder / "problems.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("problem", "solution"), *problems])
    write_talks(folder, problems)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=[END], show_progress=False
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    print(
        f"{len(texts)} files of {sum(map(len, texts)) / 1e6:.1f} million characters,"
        f" {len(problems)} problems"
    )


if __name__ == "__main__":
    main()
