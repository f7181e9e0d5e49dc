"""Procedures, driven by hand."""


def play(procedure, *answers):
    """Run a procedure on these answers; errors are thrown. Returns its steps, then its value."""
    steps, answers = [next(procedure)], list(answers)
    while True:
        answer = answers.pop(0)
        try:
            if isinstance(answer, Exception):
                steps.append(procedure.throw(answer))
            else:
                steps.append(procedure.send(answer))
        except StopIteration as end:
            assert not answers
            return steps, end.value
