"""The process of a command: the console script `flowrl` and `python -m flowrl`."""

import atexit
import gc
import os
import signal
import sys

LONG = {"train", "compare", "sweep", "bench"}
"""Commands without the checks of shapes (`flowrl.core.checks`), which cost up to two thirds of an
iteration in 2-D.
"""


def entry() -> None:
    """Run the command line and exit. Ctrl-C is one line and exit code 130 from here on; all else is
    imported below.
    """
    if {*sys.argv[1:2]} & LONG:
        os.environ.setdefault("FLOWRL_TYPECHECK", "0")
    try:
        from flowrl.run.signals import ignore_stops, leave, watch_output

        # later collections ignore what is imported so far
        gc.freeze()
        atexit.register(ignore_stops)  # the first to be registered is the last to run
        watch_output()
        from flowrl.cli.main import run

        leave(run(sys.argv[1:]))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        print("flowrl: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    entry()
