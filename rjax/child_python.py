"""Python processes of rjax, which import nothing from the working folder.

The working folder may be a downloaded model, whose files must not run: `python -c` and `python -m`
put it first among the folders of modules, before those of Python itself.
"""

import json
import pathlib
import sys

_SET_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))\n"
_ROOT = pathlib.Path(__file__).parents[1]


def child_command(code: str, *arguments: str) -> list[str]:
    """The command line of a process that runs ``code``, which imports what this process can.

    Args:
        code: source that imports modules of this package.
        arguments: arguments that the process gets in ``sys.argv[1:]``.
    """
    return [sys.executable, "-P", "-c", _SET_PATH + code, json.dumps(_module_folders()), *arguments]


def _module_folders() -> list[str]:
    """Module folders of this process without the working folder. That of this package is the last
    one, since the package may be used in its working folder without being installed."""
    here, root = str(pathlib.Path.cwd()), str(_ROOT)
    found = [str(pathlib.Path(entry).resolve()) for entry in sys.path]
    return [folder for folder in found if folder not in (here, root)] + [root]
