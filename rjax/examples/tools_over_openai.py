"""Tool calls over HTTP, with the client of OpenAI.

It needs the package ``openai``, and the extra ``serve`` for the server that it starts. The bundled
model has never seen a tool. The call is forced by ``tool_choice``, and its arguments match the
schema, because the server masks all other tokens. A model that knows tools also decides when to
call one, with ``tool_choice`` "auto".

    python -m rjax.examples.tools_over_openai
    python -m rjax.examples.tools_over_openai --url http://127.0.0.1:8000/v1
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from openai import OpenAI

from rjax.models.tables.demo import demo_system_prompt

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "read_table",
        "description": "The rows of a table, as Markdown.",
        "parameters": {
            "type": "object",
            "properties": {
                "table": {"enum": ["people"]},
                "rows": {"type": "integer", "minimum": 4, "maximum": 9},
            },
            "required": ["table", "rows"],
            "additionalProperties": False,
        },
    },
}


def read_table(table: str, rows: int) -> str:
    """The first rows of the demo table."""
    del table  # there is one
    return "\n".join(demo_system_prompt().splitlines()[2 : 4 + rows])


@contextlib.contextmanager
def bundled_server() -> Iterator[str]:
    """The URL of a server with the bundled model, for the length of the block."""
    command = [sys.executable, "-m", "rjax.serve", "--port", "0", "--warmup", "off"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            # The line "NAME on URL" says that the server is ready.
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def ask(url: str, key: str) -> None:
    """Run the function that the model calls, then ask about its result."""
    client = OpenAI(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "Read the table of people."}]
    first = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", temperature=0
    )
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        assert call.type == "function"
        print(f"the model calls {call.function.name}({call.function.arguments})")
        result = read_table(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages.append({"role": "user", "content": "What is Hollie Smigiel's job?"})
    second = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", temperature=0
    )
    print(second.choices[0].message.content)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(
        prog="python -m rjax.examples.tools_over_openai", description="Tool calls over HTTP."
    )
    parser.add_argument("--url", help="of a running server (default: start one)")
    parser.add_argument("--key", default="none", help="the server's API key")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        ask(arguments.url or stack.enter_context(bundled_server()), arguments.key)


if __name__ == "__main__":
    main()
