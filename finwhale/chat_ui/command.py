"""`finwhale chat`: a checkpoint folder, or the shipped model, in the terminal.

Owns the arguments; rooms are imported when the command runs, so that `finwhale --help` waits for
none of them. It refuses nothing that a room refuses. The easy mistake: a large --num-blocks for a
long conversation; the memory is taken at the start, used or not.
Source: spec/multimodal-serving.md section B.3 for the effort.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk to a model in the terminal.

    Shows reasoning, calls and text as they come, and after each turn: tokens, cache hits, bytes of
    cache per token, tokens per second. Ctrl-C stops the reply. Commands: /reset, /effort N,
    /thinking on|off, /stats, /quit. Reads lines from a pipe as well.

    Example: finwhale chat --tools
    """

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Checkpoint folder; by default the model that comes with the package."""
    tools: bool = False
    """Declare the demo tools (calculator, values, files) and run their calls here."""
    no_thinking: bool = False
    """Answer without reasoning first."""
    effort: Annotated[int, tyro.conf.arg(metavar="N")] = 75
    """How much to reason, 1 to 100."""
    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """A system message before everything else."""
    max_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 1024
    """New tokens of one reply at most."""
    temperature: Annotated[float, tyro.conf.arg(metavar="T")] = 1.0
    """0 takes the most likely token."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Seed of the sampler; by default another one for each reply."""
    num_blocks: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    """Blocks of 64 tokens of the cache."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Load the model and talk until the end of input or /quit."""
        from finwhale.checkpoint.shipped import checkpoint_folder
        from finwhale.telemetry import get_logger
        from finwhale.text.prompt import effort_of
        from finwhale.text.tokenizer import Tokenizer

        # The cheap refusals come first.
        effort = effort_of(self.effort)

        folder = checkpoint_folder(self.model)
        if not self.debug:
            # A line per request belongs in a server's log, not between the lines of a talk.
            for room in ("serve", "engine"):
                get_logger(room).setLevel("WARNING")
        tokenizer = Tokenizer.from_file(folder)

        from finwhale.chat_ui.chat_terminal import Settings, chat_on
        from finwhale.chat_ui.demo_tools import DemoTools
        from finwhale.checkpoint.load import load_model
        from finwhale.config.accounting import kv_bytes_per_token
        from finwhale.config.engine import EngineConfig
        from finwhale.config.server import ServerConfig
        from finwhale.engine.engine import Engine
        from finwhale.model import Numerics
        from finwhale.ops import FAST
        from finwhale.serve.planning import Sampling
        from finwhale.serve.service import Service

        config = EngineConfig(num_blocks=self.num_blocks, max_sequences=1, max_batch_tokens=256)
        model = load_model(folder, numerics=Numerics(), ops=FAST).model
        digest = hashlib.sha256(tokenizer.raw.to_str().encode()).hexdigest()
        service = Service.of_engine(
            Engine(model, config, tokenizer_digest=digest), tokenizer, ServerConfig()
        )
        chat_on(
            service,
            settings=Settings(
                thinking=not self.no_thinking,
                effort=effort,
                system=self.system,
                sampling=Sampling(
                    max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed
                ),
            ),
            bytes_per_token=kv_bytes_per_token(model.config.text_config),
            tools=DemoTools() if self.tools else None,
            greeting=f"{folder.name}: {service.preparer.context_tokens:,} tokens of context",
        )
        return 0
