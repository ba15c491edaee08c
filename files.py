"""What scripts do alike without torch: one-line errors, files that are whole or not there, locks.

prepare.py needs no more than this: importing torch takes a second, as long as tokenizing 25 MB of text.
"""
import json
import linecache
import os
import signal
import sys
from pathlib import Path


class Stopped(Exception):
    """A run that cannot go on, told in one line; exit code 1."""


def run(main):
    """Call main() and turn the user's slips into one line and exit code 2.

    A ValueError that our own `raise` made and any OSError are messages to the user. Everything else, int("x") too, is a
    fault of the code and keeps its traceback. Ctrl-C: exit code 130, SIGTERM: 143.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")    # a console without a letter shows "?" and the run goes on
    signal.signal(signal.SIGTERM, ended)        # so that worker processes are ended too; loops have a StopSignal
    leave(outcome(main))


def outcome(main):
    """The exit code of main(), after a line about what went wrong."""
    try:
        return main()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:                     # who read our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Stopped as error:
        print(f"stopped: {who()}{error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        if not isinstance(error, OSError) and not raised_here(error):
            raise
        print(f"error: {who()}{error}", file=sys.stderr)
        return 2


def leave(code):
    """End with this exit code. One of several ranks ends at once: threads of a broken process group would abort it."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code or 0)
    sys.exit(code)


def who():
    """Which of a run's processes speaks, but for the first one (torchrun numbers them)."""
    return "" if os.environ.get("RANK", "0") == "0" else f"rank {os.environ['RANK']}: "


def ended(number, frame):
    print("stopped by SIGTERM", file=sys.stderr)
    sys.exit(128 + number)


def raised_here(error):
    """Whether a `raise` statement of this project made the error."""
    tb = error.__traceback__
    while tb.tb_next:
        tb = tb.tb_next
    file = tb.tb_frame.f_code.co_filename
    ours = Path(file).resolve().parent == Path(__file__).resolve().parent
    return ours and linecache.getline(file, tb.tb_lineno).lstrip().startswith("raise ")


def first_line(error):
    return str(error).partition("\n")[0]


def write_atomically(path, write):
    """Call write(file) on a file beside `path`, flush it to the disk, then rename: a reader, or a run that is killed
    at any moment, finds the old file or the new one, never a part."""
    path = Path(path)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if not isinstance(error, (OSError, RuntimeError)):      # RuntimeError: what torch.save makes of a full disk
            raise
        raise OSError(f"{path} cannot be written: {first_line(error)}") from None
    if os.name == "posix":                  # the rename itself reaches the disk with its folder
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def lock(path, name, shared=False, wait=False):
    """Open a file for appending and hold it until it is closed: alone, or `shared` with others who share it. If
    somebody else holds it, ValueError that speaks of `name`, or `wait`. Returns the open file."""
    file = open(path, "ab")
    try:
        import fcntl
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        raise ValueError(f"{name} is in use by another process; wait for it, or write to another --out_dir") from None
    except (ImportError, OSError):
        pass                                                    # Windows, or a file system without locks
    return file


def write_json(path, content):
    write_atomically(path, lambda file: file.write(json.dumps(content, indent=1).encode()))
