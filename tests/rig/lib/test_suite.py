"""The verdict over a case: it has to say that it passed."""

import contextlib
import io
import unittest

from suite import Outcome


def verdict(lines, status=0):
    outcome = Outcome()
    with contextlib.redirect_stdout(io.StringIO()):
        for line in lines:
            outcome.line(line)
    return outcome.verdict(status)


class Verdicts(unittest.TestCase):
    def test_a_case_that_says_ok_has_passed(self):
        self.assertEqual(verdict(["ok it works"]), "passed")

    def test_a_silent_case_has_failed(self):
        self.assertEqual(verdict([]), "failed")
        self.assertEqual(verdict(["okay, nothing to see", "# ok"]), "failed")

    def test_one_failing_line_fails_the_case(self):
        self.assertEqual(verdict(["ok one", "not ok two", "ok three"]), "failed")

    def test_a_bad_exit_fails_a_case_whose_lines_are_fine(self):
        self.assertEqual(verdict(["ok one"], status=1), "failed")

    def test_a_skip_is_counted_and_never_hides_a_failure(self):
        self.assertEqual(verdict(["skip no mirror"]), "skipped")
        self.assertEqual(verdict(["not ok one", "skip no mirror"]), "failed")
