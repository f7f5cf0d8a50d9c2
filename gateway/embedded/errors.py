"""What can go wrong while starting, each in one line that says what to do.

EmbeddedError
├── StateFolderBusy     another `loraplex serve` owns the folder
├── StateFolderBroken   the folder can't be used: rights, place, length
├── ChildFailed         a process didn't come up; its own words are in the message
└── ServeRefused        an option or the environment doesn't allow to serve
"""


class EmbeddedError(Exception):
    """Base of every start-up failure that is told without a stack trace."""


class StateFolderBusy(EmbeddedError):
    """The state folder is locked by a running process."""


class StateFolderBroken(EmbeddedError):
    """The state or runtime folder can't be used."""


class ChildFailed(EmbeddedError):
    """A child process ended, or said that it can't serve, before it was ready."""


class ServeRefused(EmbeddedError):
    """What was asked for can't be served here."""
