"""A disk on which the n-th operation fails."""

import errno
import os


class DiedError(BaseException):
    """The process is gone; nothing that it would still do happens."""


NAMES = ("open", "write", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir")
TAKING_SPACE = ("write", "fsync", "replace", "rename", "mkdir")


class FailingDisk:
    """Counts changes of the disk. The `at`-th one fails as `mode` says: "error" raises once, "full"
    raises from then on where space is taken, "before" and "after" end the process before or after
    it, "half" in the middle of a write.
    """

    def __init__(self, monkeypatch, mode, step):
        self.mode, self.at, self.count, self.dead, self.fired = mode, step, 0, False, False
        for name in NAMES:
            monkeypatch.setattr(os, name, self.failing(name, getattr(os, name)))

    def failing(self, name, real):
        def operation(*arguments, **options):
            if self.dead:
                raise DiedError
            self.count += 1
            if not self.due(name, arguments):
                return None if name == "fsync" else real(*arguments, **options)
            self.fired = True
            if self.mode in ("error", "full"):
                code = errno.ENOSPC if name in ("open", *TAKING_SPACE) else errno.EIO
                raise OSError(code, os.strerror(code), str(arguments[0]))
            self.dead = True
            if self.mode == "half" and name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            elif self.mode == "after":
                real(*arguments, **options)
            raise DiedError

        return operation

    def due(self, name, arguments):
        if self.mode == "full":
            return self.count >= self.at and (
                name in TAKING_SPACE or (name == "open" and arguments[1] & os.O_CREAT)
            )
        return self.count == self.at
