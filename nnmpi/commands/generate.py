"""`nnmpi generate`: a prompt, continued by a run's language model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

import nnmpi.base.clock as clock
from nnmpi.base.command import check_numbers, read_command, require
from nnmpi.base.errors import UsageError
from nnmpi.comm.agreement import on_root
from nnmpi.comm.group import Group
from nnmpi.comm.ranks import parse_together
from nnmpi.commands.start import OpeningConfig, launch_command
from nnmpi.compose.inference import TokenGenerator, choose_token
from nnmpi.data.chat import template_of
from nnmpi.data.tokenizer import Tokenizer
from nnmpi.models.pretrained import read_ends
from nnmpi.train.config import SEQUENCE_MODELS

PROGRAM = "nnmpi generate"
DESCRIPTION = """Generate text with a language model: nnmpi generate RUN --prompt TEXT.

RUN is the folder of a run of --model lstm, gpt or llama (its last checkpoint is used), or a folder
of Hugging Face's transformers with a GPT-2, Llama, Mistral, Qwen or SmolLM. Keys and values are
cached, so each new token costs one forward pass of one token. The text ends at the tokenizer's end,
and at any token that such a folder names as an end.

mpirun -n 4 nnmpi generate RUN --pp 2 --tp 2 takes four ranks."""


@dataclass(frozen=True)
class WritingConfig:
    """Text."""

    prompt: str = ""
    """Start of the text; for a run without a tokenizer, token numbers such as "17 4"."""
    chat: bool = False
    """Have --prompt be what a user says, and print what the assistant answers, by the chat template
    that stands beside the tokenizer.
    """
    tokens: int = 200
    """Maximum number of tokens to generate; the text may end sooner."""
    temperature: float = 1.0
    """Sampling temperature: below 1 favours likely tokens; 0 is greedy."""
    top_k: int = 0
    """Sample from the k likeliest tokens. 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest likeliest tokens whose probabilities add up to this. 1: from all."""
    seed: int = 0
    """Seed of the sampling."""

    def __post_init__(self) -> None:
        check_numbers(self, "tokens", 1)
        check_numbers(self, "temperature top_k seed", 0)
        require(0 < self.top_p <= 1, f"--top-p is {self.top_p}; give a number above 0, up to 1")


parse = partial(read_command, "RUN", PROGRAM, DESCRIPTION, (WritingConfig, OpeningConfig))


def main(words: Sequence[str], group: Group) -> None:
    """Print the prompt and its continuation. Collective.

    Raises:
        NnmpiError: on all ranks; UsageError for wrong options, a run of another model, or a prompt
            that does not fit.
    """
    console, (folder, options, opening) = parse_together(words, parse, group)
    if opening.sp > 1:
        raise UsageError(
            f"--sp {opening.sp} shares positions, but text is generated one position at a time;"
            " leave --sp out"
        )
    begin = clock.now()
    run = opening.open(folder, group)
    model = run.config.model.model
    known = f"{', '.join(SEQUENCE_MODELS[:-1])} or {SEQUENCE_MODELS[-1]}"
    require(
        model in SEQUENCE_MODELS,
        f"{folder} is a run of model {model}; only {known} can generate text",
    )
    generator = TokenGenerator(run.arrangement, run.backend, run.config.numerics.precision)
    context = None if model == "lstm" else run.signature.sample_shape[0]
    tokenizer = run.tokenizer
    prompt, ends = on_root(group, partial(_tokens, options, tokenizer, run.classes, Path(folder)))
    choose = partial(
        choose_token,
        draw=np.random.default_rng(options.seed),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    ready = clock.now()
    written: list[int] = []
    for token in islice(
        generator.write(prompt, context, lambda logits: group.share(choose(logits))), options.tokens
    ):
        if token in ends:
            break
        written.append(token)
    seconds, text = clock.now() - ready, written if options.chat else [*prompt, *written]
    generator.release()
    console.finish(
        " ".join(map(str, text)) if tokenizer is None else tokenizer.decode(text),
        f"{len(written)} tokens in {seconds:.2f} s, {len(written) / max(seconds, 1e-9):.0f} a"
        f" second; loading took {ready - begin:.2f} s",
    )


def _tokens(
    options: WritingConfig, tokenizer: Tokenizer | None, vocabulary: int, folder: Path
) -> tuple[list[int], list[int]]:
    """Return a prompt's tokens, and the tokens that end a text."""
    named, prompt = read_ends(folder), options.prompt
    if options.chat:
        template = template_of({} if tokenizer is None else tokenizer.beside, folder)
        prompt = template.render([{"role": "user", "content": prompt}], begins_reply=True)
    if tokenizer is not None:
        require(
            tokenizer.vocabulary_size <= vocabulary,
            f"the tokenizer has {tokenizer.vocabulary_size} tokens, but the model {vocabulary};"
            " restore the run's own",
        )
        try:
            return tokenizer.encode(prompt), [tokenizer.end, *named]
        except UsageError as error:
            raise UsageError(f"--prompt: {error}") from None
    try:
        tokens = [int(word) for word in prompt.split()]
    except ValueError:
        raise UsageError(
            f"--prompt is {prompt!r}, but the run has no tokenizer; give token numbers"
        ) from None
    for token in tokens:
        require(
            0 <= token < vocabulary,
            f"--prompt: token {token} is not in the model's vocabulary, 0..{vocabulary - 1}",
        )
    return tokens, named


if __name__ == "__main__":
    launch_command(parse, main)
