"""Training of the bundled model.

The whole run that made the checkpoint, on all GPUs of the machine with cuDNN attention:

    python -m bench.train_bundled_model.tokenizer
    python -m bench.train_bundled_model --implementation cudnn --out models/tables/checkpoint
    python -m bench.table_answers

A run can be cut short with --minutes and continued with the same command and the same --state.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from bench.train_bundled_model.data import (
    Batch,
    Plan,
    Shape,
    batches,
    make_batch,
)
from bench.train_bundled_model.questions import Question
from bench.train_bundled_model.rows import fresh_pointers
from bench.train_bundled_model.scoring import score
from bench.train_bundled_model.sizes import SIZES, model_config, plans
from bench.train_bundled_model.step import (
    Trainer,
    Weights,
    arrays,
    compiled,
    fresh_parameters,
    optimizer,
    replicated,
)
from bench.train_bundled_model.tokenizer import BOS, END, NEWLINE, PAD
from bench.train_bundled_model.words import Pool
from rjax.models import BUNDLED_MODEL
from rjax.models.decoder import Decoder
from rjax.models.loading.load import load_model
from rjax.models.loading.save import save_model

CHECKED: tuple[Pool, ...] = ("held_out", "real")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def teacher_forced(batch: Batch, correct: np.ndarray) -> Iterator[tuple[Question, bool]]:
    """The questions of a batch and whether greedy decoding would answer each exactly."""
    for b, asked in enumerate(batch.questions):
        wrong = {int(s) for s in batch.segments[b][batch.answers[b] & ~correct[b]]}
        for at, question in enumerate(asked, 1):
            yield question, at not in wrong


class Run:
    """A training run: parameters, optimizer, compiled steps, and where they are kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.size = SIZES[args.size].of_examples(args.examples)
        self.tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
        self.config = model_config(self.size, self.tokenizer)
        self.graph, parameters = fresh_parameters(self.config, args.seed)
        if args.start_from is not None:
            loaded = load_model(args.start_from, dtype=jnp.float32, progress=False)
            parameters = nnx.state(loaded.model)
        self.state = {"model": parameters, "pointers": fresh_pointers(self.config, args.seed)}
        transform = optimizer(
            args.learning_rate, args.steps, min(200, args.steps // 10), args.decay
        )
        self.moments = transform.init(self.state)
        self.trainer = Trainer(
            self.graph,
            self.tokenizer.get_vocab()[NEWLINE],
            transform,
            args.implementation,
            jnp.dtype(args.compute_dtype),
            Weights(row=args.row_weight, pointer=args.pointer_weight, ordinal=args.ordinal_weight),
        )
        self.mesh = jax.make_mesh((jax.device_count(),), ("data",))
        self.step = 0
        if args.state is not None and args.state.exists():
            self._restore(args.state)
        self.state, self.moments = replicated((self.state, self.moments), self.mesh)

    def _restore(self, path: Path) -> None:
        leaves, tree = jax.tree.flatten((self.state, self.moments))
        with np.load(path) as kept:
            self.step = int(kept["step"])
            loaded = [jnp.asarray(kept[f"leaf{at}"], leaf.dtype) for at, leaf in enumerate(leaves)]
        self.state, self.moments = jax.tree.unflatten(tree, loaded)
        print(f"continuing at step {self.step} from {path}", flush=True)

    def keep(self, path: Path) -> None:
        """Write everything needed to continue."""
        leaves = jax.tree.leaves((self.state, self.moments))
        kept: dict[str, Any] = {f"leaf{at}": np.asarray(leaf) for at, leaf in enumerate(leaves)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, step=np.int64(self.step), **kept)

    def model(self) -> Decoder:
        """The model as it will be loaded: in bfloat16."""
        return dataclasses.replace(self.trainer, dtype=jnp.dtype("bfloat16")).model(self.state)

    def save(self, folder: Path) -> None:
        """Write the Hugging Face folder."""
        save_model(self.model(), self.config, folder)
        for name in TOKENIZER_FILES:
            if (self.args.tokenizer / name).resolve() != (folder / name).resolve():
                shutil.copy(self.args.tokenizer / name, folder / name)
        # Tools that read config.json alone need the special tokens too.
        config = json.loads((folder / "config.json").read_text())
        for name, token in (("bos", BOS), ("eos", END), ("pad", PAD)):
            config[f"{name}_token_id"] = self.tokenizer.token_to_id(token)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def train(self) -> None:
        """Steps until the last one, or until the time is up."""
        args, began = self.args, time.monotonic()
        todo = plans(self.size, args.steps, args.seed, args.start_from is None)[self.step :]
        beside = self.size.stages[-1].beside
        checks = [
            make_batch(
                Plan(10**9, self.size.check, which=which, beside=beside), self.tokenizer, True
            )
            for which in CHECKED
        ]
        samples = {
            shape: make_batch(Plan(0, dataclasses.replace(shape, rows=(3, 3))), self.tokenizer)
            for shape in dict.fromkeys(plan.shape for plan in todo)
        }
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            updates = {
                shape: threads.submit(
                    compiled,
                    self.trainer.update,
                    self.mesh,
                    (False, False, True, False, False),
                    (0, 1),
                    self.state,
                    self.moments,
                    arrays(sample),
                    np.float32(0),
                )
                for shape, sample in samples.items()
            }
            correct = threads.submit(
                compiled,
                self.trainer.correct,
                self.mesh,
                (False, True, True),
                (),
                self.state,
                arrays(checks[0]),
            )
            source = batches(todo, args.tokenizer / "tokenizer.json", args.workers)
            log = Log(args.log)
            waited = 0.0
            for plan in todo:
                asked = time.monotonic()
                batch = next(source)
                waited += time.monotonic() - asked
                update = updates[plan.shape].result()
                progress = np.float32(self.step / args.steps)
                self.state, self.moments, metrics = update(
                    self.state, self.moments, arrays(batch), progress
                )
                self.step += 1
                log.count(plan.shape)
                last = self.step == args.steps
                if self.step % args.log_every == 0 or last:
                    log.line(self.step, metrics, waited)
                    waited = 0.0
                if self.step % args.check_every == 0 or last:
                    self.check(checks, correct.result())
                    self.save(args.out)
                    log.restart()
                if time.monotonic() - began > 60 * args.minutes:
                    break
            jax.block_until_ready(self.state)
            source.close()  # pyright: ignore[reportAttributeAccessIssue]

    def check(self, checks: list[Batch], correct: Any) -> None:
        """Print the exact-answer rate on tables of each of the pools that training never sees."""
        for which, batch in zip(CHECKED, checks, strict=True):
            marks = np.asarray(correct(self.state, arrays(batch)))
            groups = score(teacher_forced(batch, marks))
            line = "  ".join(f"{name} {100 * s.accuracy:.1f}" for name, s in groups.items())
            print(f"   {which} at {self.step}: {line}", flush=True)


class Log:
    """Prints and keeps a line of figures now and then."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.restart()

    def restart(self) -> None:
        """Begin to measure speed anew."""
        self.tokens, self.steps, self.since = 0, 0, time.monotonic()

    def count(self, shape: Shape) -> None:
        """Note one step."""
        self.steps += 1
        self.tokens += shape.batch * (shape.prefix + shape.branches)

    def line(self, step: int, metrics: dict[str, Any], waited: float) -> None:
        """Print the last step's figures and the speed since the last line."""
        figures = {name: round(float(value), 4) for name, value in metrics.items()}
        seconds = time.monotonic() - self.since
        figures |= {
            "step": step,
            "tokens_per_s": round(self.tokens / seconds),
            "steps_per_s": round(self.steps / seconds, 2),
            "waited_s": round(waited, 2),
        }
        print(" ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(figures) + "\n")
        self.restart()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m bench.train_bundled_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    p.add_argument("--tokenizer", type=Path, default=BUNDLED_MODEL, help="its folder")
    p.add_argument("--state", type=Path, help="file to continue from and to keep the run in")
    p.add_argument("--log", type=Path, help="file for one JSON line per printed line")
    p.add_argument(
        "--start-from", type=Path, help="checkpoint to start from, without the curriculum"
    )
    p.add_argument("--size", choices=SIZES, default="full")
    p.add_argument("--examples", type=int, help="maximum examples a step, for small machines")
    p.add_argument("--steps", type=int, default=12000, help="of the whole run, all calls together")
    p.add_argument("--minutes", type=float, default=1e9, help="stop training after so long")
    p.add_argument("--learning-rate", type=float, default=3e-3)
    p.add_argument("--decay", type=float, default=0.5, help="share of steps with falling rate")
    p.add_argument("--row-weight", type=float, default=0.2, help="of that part of the loss")
    p.add_argument("--pointer-weight", type=float, default=0.2, help="likewise")
    p.add_argument("--ordinal-weight", type=float, default=0.05, help="likewise")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--workers", type=int, default=14, help="processes that make batches")
    p.add_argument("--implementation", choices=("xla", "cudnn"), default="xla")
    p.add_argument("--compute-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--log-every", type=int, default=100)
    p.add_argument("--check-every", type=int, default=500)
    return p


def main() -> None:
    """Train and save."""
    args = parser().parse_args()
    began = time.monotonic()
    run = Run(args)
    run.train()
    run.save(args.out)
    if args.state is not None:
        run.keep(args.state)
    print(f"step {run.step} after {time.monotonic() - began:.0f} s; checkpoint in {args.out}")


if __name__ == "__main__":
    main()
