"""Text in, text out: what a model writes for each prompt.

    python sample.py --model=runs/tiny "The <extra_id_0> of a list is its <extra_id_1>."     # fills in the blanks
    python sample.py --model=google/flan-t5-small "Translate to German: How old are you?"    # from the Hub
    python sample.py --model=path/to/folder --file=questions.txt --num_beams=4 > answers.txt # a prompt a line
    cat questions.txt | python sample.py --model=path/to/folder --temperature=0.7 --top_p=0.9 --num_samples=2

A model is a run of train.py, a folder in Hugging Face's format or a name on the Hub. Blanks, <extra_id_0> and so on,
are answered in the prompt's own words: the sentence is shown with the answers in brackets.
"""
import itertools
import json
import sys
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

import files
import runtime
from configurator import configure
from data import Tokenizer, by_length, key_of
from model import T5, config_from_hf, pretrained_folder


@dataclass
class SampleConfig:
    """What writes, and how. Prompts: arguments beside the settings, lines of --file, or lines of standard input."""
    model: str | None = None        # run folder, folder in Hugging Face's format, or Hub name
    vocab: str | None = None        # SentencePiece file; None: the model's own
    file: str | None = None         # prompts, one a line; without it and without prompts: standard input
    max_new_tokens: int = 128       # ids written at most
    num_beams: int = 1              # above 1: beam search
    num_samples: int = 1            # answers to each prompt
    temperature: float = 0.0        # 0: the likeliest id each time; above: samples
    top_k: int = 0                  # samples come from so many likeliest ids; 0: all
    top_p: float = 1.0              # and of those from the likeliest that make up this probability
    length_penalty: float = 1.0     # beam search: above 1 favours long answers
    early_stopping: bool = False    # beam search: done as soon as num_beams answers are complete
    ban_sentinels: bool = False     # never write <extra_id_N>
    batch_size: int = 16            # prompts at a time, alike in length, fewer of very long ones; 1: answers at once
    json: bool = False              # an object a line: index, prompt, answers; and filled, where there are blanks
    seed: int = 0                   # of samples; each prompt's follow from it and the prompt's number
    device: str = "auto"            # auto, cpu, cuda, cuda:1, mps
    dtype: str = "auto"             # auto, float32 or bfloat16

    def __post_init__(self):
        if self.model is None:
            raise ValueError("no model is given; --model=runs/tiny, a folder in Hugging Face's format, or a Hub name")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")
        if not 0 <= self.seed < 2 ** 63:
            raise ValueError(f"seed={self.seed} must lie in [0, 2^63)")


CHUNK = 8                           # batches whose prompts are sorted by length together


def parse(argv):
    """(settings, prompts) of a command line: what begins with -- is a setting, what ends in .py and has no blanks a
    config file, all else a prompt, and so is whatever stands behind a lone --."""
    end = argv.index("--") if "--" in argv else len(argv)
    settings = [a for a in argv[:end] if a.startswith("-") or (a.endswith(".py") and " " not in a)]
    prompts = [a for a in argv[:end] if a not in settings] + argv[end + 1:]
    odd = [a for a in settings if a.startswith("-") and not a.startswith("--") and a != "-h"]
    if odd:
        raise ValueError(f"command line: {odd[0]!r} is no setting (--name=value); a prompt that begins with - stands"
                         f" behind a lone --")
    cfg, = configure(SampleConfig, argv=settings, also=" [PROMPT ...]")
    if prompts and cfg.file:
        raise ValueError(f"prompts and file={cfg.file} exclude each other")
    return cfg, prompts


def open_prompts(cfg, prompts):
    """(prompts, how many there are or None): those of the command line, else the lines of --file or standard input."""
    if prompts:
        return iter(prompts), len(prompts)
    if cfg.file:
        with open(cfg.file, "rb") as file:
            n = sum(1 for _ in file)                            # lines end at \n alone, as wc counts them
        return open(cfg.file, encoding="utf-8", errors="replace", newline="\n"), n
    if sys.stdin.isatty():
        print("one prompt a line; Ctrl-D ends", file=sys.stderr)
    sys.stdin.reconfigure(encoding="utf-8", errors="replace", newline="\n")
    return sys.stdin, None


class Writer:
    """A loaded model and its tokenizer: answers to prompts, and how they are shown."""

    def __init__(self, cfg):
        self.cfg, self.device = cfg, runtime.pick_device(cfg.device)
        self.autocast = runtime.autocast(self.device, runtime.pick_dtype(cfg.dtype, self.device))
        folder = pretrained_folder(cfg.model)
        vocab_size = config_from_hf(folder)[0].vocab_size       # what does not fit is told before the weights are read
        self.tokenizer = Tokenizer(cfg.vocab) if cfg.vocab else Tokenizer.from_pretrained(folder)
        self.tokenizer.check_fits(vocab_size)
        self.model = T5.from_pretrained(folder, self.device)
        self.suppress = self.tokenizer.suppress(vocab_size, cfg.ban_sentinels)

    def answers(self, numbers, prompts, on_step=None):
        """For each prompt a list of num_samples rows of ids."""
        cfg = self.cfg
        source, mask = (torch.from_numpy(a).to(self.device) for a in self.tokenizer.batch(prompts))
        seeds = (key_of(cfg.seed, numbers) >> np.uint64(1)).tolist()        # no two runs share a prompt's numbers
        what = f"{len(prompts)} prompts of {source.shape[1]:,} ids, the first is number {min(numbers)}"
        with self.autocast, runtime.memory_told(what, "a smaller --batch_size, or shorter prompts"):
            ids = self.model.generate(
                source, mask, cfg.max_new_tokens, cfg.num_beams, cfg.num_samples, cfg.temperature, cfg.top_k,
                cfg.top_p, cfg.length_penalty, cfg.early_stopping, self.suppress, seeds, on_step)
        return ids.unflatten(0, (len(prompts), cfg.num_samples)).tolist()

    def batches(self, prompts):
        """(number, prompt) pairs cut into batches alike in length."""
        lengths = [len(self.tokenizer.encode(text)) + 1 for _, text in prompts]
        for rows in by_length(lengths, self.cfg.batch_size):
            yield [prompts[i] for i in rows]

    def has_blanks(self, source):
        return any(map(self.tokenizer.is_sentinel, source))

    def show(self, number, prompt, answers):
        """The lines printed for one prompt: the text of each answer, or the sentence with the blanks filled in."""
        source = self.tokenizer.encode(prompt)
        blanks = self.has_blanks(source)
        texts = [self.tokenizer.decode(ids, sentinels=blanks) for ids in answers]
        filled = [self.tokenizer.fill(source, ids) for ids in answers] if blanks else None
        if self.cfg.json:
            record = {"index": number, "prompt": prompt, "answers": texts} | ({"filled": filled} if blanks else {})
            return [json.dumps(record, ensure_ascii=False)]
        return [" ".join(text.splitlines()) for text in filled or texts]     # one line each: ByT5 can write line ends

    def stream(self, prompt):
        """Print the answer to one prompt as it comes."""
        ids, shown = [], 0

        def show(text):
            nonlocal shown
            print(text[shown:], end="", flush=True)
            shown = len(text)

        def on_step(newest):
            ids.append(int(newest[0, 0]))
            show(self.tokenizer.decode(ids).rstrip("\ufffd"))          # a letter of which some bytes are to come

        self.answers([0], [prompt], on_step)
        show(self.tokenizer.decode(ids))
        print()


def main(argv=None):
    cfg, prompts = parse(sys.argv[1:] if argv is None else list(argv))
    stream, n = open_prompts(cfg, prompts)
    writer = Writer(cfg)
    one_by_one = n is None and stream.isatty()
    plain = cfg.num_beams == cfg.num_samples == 1 and not cfg.json and sys.stdout.isatty()
    if len(prompts) == 1 and prompts[0].strip() and plain and not writer.has_blanks(
            writer.tokenizer.encode(prompts[0])):
        return writer.stream(prompts[0])
    from tqdm import tqdm
    lines = ((number, line.strip("\r\n")) for number, line in enumerate(stream))
    with tqdm(total=n, unit=" prompts", disable=True if n == 1 or one_by_one else None) as bar:
        n_line = 1 if one_by_one or cfg.batch_size == 1 else CHUNK * cfg.batch_size
        while chunk := list(itertools.islice(lines, n_line)):
            answers = {number: [[]] * cfg.num_samples for number, text in chunk if not text.strip()}    # empty: empty
            waiting = deque(chunk)                              # to be printed, in this order
            batches = writer.batches([entry for entry in chunk if entry[0] not in answers])
            for part in itertools.chain(batches, [()]):         # the last time for what follows the last batch
                if part:
                    numbers, texts = zip(*part, strict=True)
                    answers.update(zip(numbers, writer.answers(numbers, texts), strict=True))
                while waiting and waiting[0][0] in answers:
                    number, prompt = waiting.popleft()
                    for line in writer.show(number, prompt, answers.pop(number)):
                        bar.write(line)
                    bar.update()
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    files.run(main)
