"""What a user can get wrong, as one type."""


class UserError(Exception):
    """An error that a user can cause and mend: ends the program with one line and exit code 2.

    Its three parts are complete phrases: `what` is wrong (with the value), `why` (with the limit or the
    cause), and what to do about it (`remedy`).
    """

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(f"{what}: {why}; {remedy}")
        self.what = what
        self.why = why
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        # It crosses processes; the default would call __init__ with the finished sentence.
        return type(self), (self.what, self.why, self.remedy)
