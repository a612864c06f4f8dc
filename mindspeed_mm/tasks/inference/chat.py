"""`mindspeed-mm chat PATH`: a conversation with a model, line by line, whose answers appear as they are generated."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.configs.files import describe_missing
from mindspeed_mm.configs.flags.parser import build_parser
from mindspeed_mm.configs.vlm_inference import AnswerFlags
from mindspeed_mm.tasks.inference.describe import AnswerRun, describe_answers
from mindspeed_mm.utils.errors import BadSample, ConfigError, did_you_mean
from mindspeed_mm.utils.launch import this_launch
from mindspeed_mm.utils.log import log_on_stderr

if TYPE_CHECKING:
    from mindspeed_mm.data.conversation.messages import Message
    from mindspeed_mm.data.media.media import MediaKind, MediaRef
    from mindspeed_mm.tasks.inference.generation import AnswerGenerator

_COMMAND = re.compile(r"/(\w+)(?:\s+(.*))?")
_MEDIA: dict[str, MediaKind] = {"image": "image", "video": "video", "audio": "audio"}
_COMMANDS = (*_MEDIA, "clear", "exit", "help")
HELP = (
    "/image PATH, /video PATH, /audio PATH: a medium of the next line; /clear: forget the conversation; /exit, or the "
    "end of the input: end"
)


def main(argv: Sequence[str]) -> int:
    """Run the words after `mindspeed-mm chat`; return the exit status.

    Raises:
        MMError: the model can't be loaded.
    """
    words = list(argv)
    if not words or "-h" in words or "--help" in words:
        parser = build_parser((AnswerFlags,))
        parser.prog, parser.usage = "mindspeed-mm chat", "mindspeed-mm chat PATH [--flag …]"
        parser.description = f"Talk to a model, wherever it comes from (docs/inference.md).\n{HELP}"
        parser.print_help()
        return 0 if words else 2
    named = ["--load", words[0], *words[1:]] if not words[0].startswith("-") else words
    with log_on_stderr():
        run = describe_answers(named, chats=True)
        if this_launch().world_size > 1 or run.sharding is not None:
            raise ConfigError("chat: a conversation is one process's, and its model isn't sharded; start it by itself")
        Chat(run).talk(_lines())
    return 0


def _lines() -> Iterator[str]:
    """Lines of standard input; a terminal shows where to write."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401 (input() then has a history)

    print(HELP, file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


@dataclass
class Chat:
    """A conversation.

    Attributes:
        run: the described command.
        messages: the turns so far.
        media: media of the user's next turn.
    """

    run: AnswerRun
    messages: list[Message] = field(default_factory=list)
    media: list[MediaRef] = field(default_factory=list)

    def __post_init__(self) -> None:
        from mindspeed_mm.tasks.inference.session import open_generator, open_prompts, positions_of

        prompts = open_prompts(self.run)
        self._positions = positions_of(self.run)
        self._generator: AnswerGenerator = open_generator(self.run, prompts)
        self._turns = 0
        self._clear()

    def talk(self, lines: Iterator[str]) -> None:
        """Do what each line says: a command, or a turn of the user, which is answered on standard output."""
        for line in lines:
            text = line.rstrip("\r\n")
            command = _COMMAND.fullmatch(text.strip())
            try:
                if command is None:
                    if text.strip():
                        self._answer(text)
                elif command[1] == "exit":
                    return
                else:
                    self._do(command[1], (command[2] or "").strip())
            except BadSample as error:
                print(error, file=sys.stderr, flush=True)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                print("\ninterrupted; the turn is forgotten", file=sys.stderr)

    def _do(self, name: str, argument: str) -> None:
        from mindspeed_mm.data.media.media import MediaRef

        kind = _MEDIA.get(name)
        if kind is not None:
            reads = self._generator.prompts.reads
            if kind not in reads:
                takes = ", ".join(reads) or "text only"
                raise BadSample(f"/{name}: this model takes {takes}", f"a model that doesn't read {kind}s")
            if not argument or not Path(argument).is_file():
                raise BadSample(
                    f"/{name}: {describe_missing(argument) if argument else 'a path is missing'}", "no file"
                )
            self.media.append(MediaRef(kind, argument))
        elif name == "clear":
            self._clear()
        elif name == "help":
            print(HELP, file=sys.stderr)
        else:
            near = did_you_mean(name, _COMMANDS)
            raise BadSample(f"there is no command /{name}{near}; {HELP}", "no such command")

    def _clear(self) -> None:
        from mindspeed_mm.tasks.inference.requests import system_message

        self.messages, self.media = system_message(self.run.system), []

    def _answer(self, text: str) -> None:
        from mindspeed_mm.data.conversation.messages import Message
        from mindspeed_mm.tasks.inference.requests import request_of
        from mindspeed_mm.tasks.inference.session import check_length

        media, self.media = self.media, []
        asked = [*self.messages, Message("user", [*media, text])]
        request = request_of(asked, self._turns, "this turn")
        check_length(request, self._generator.prompts.measure(request), self._positions)
        answer = self._generator.stream(request, _write)
        self._turns += 1
        _write("\n")
        if answer.finish == "length":
            most = answer.new_tokens
            print(f"the answer is cut off after {most} tokens (--max-new-tokens)", file=sys.stderr, flush=True)
        self.messages = [*asked, Message("assistant", [answer.text])]


def _write(text: str) -> None:
    print(text, end="", flush=True)
