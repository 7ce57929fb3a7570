"""limits.py on small results."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest

import limits

CONTEXT = {"date": "2026-01-02T03:04:05+00:00"}
LIMITS = (
    limits.Limit("step/*/clip*", "floor_ratio", most=1.06),
    limits.Limit("peers/*/graph", "ratio", least=1.4),
)


class LimitsTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)

    def measured(self, *benchmarks):
        listed = [{"name": name, "run_type": "iteration", **counters} for name, counters in benchmarks]
        (self.directory / "some.json").write_text(json.dumps({"context": CONTEXT, "benchmarks": listed}))
        return limits.report.Results(self.directory)

    def broken(self, *benchmarks):
        return limits.broken_limits(self.measured(*benchmarks), LIMITS)

    def test_what_keeps_them_is_not_named(self):
        self.assertEqual(self.broken(("step/a/clip+adam", {"floor_ratio": 1.06})), [])
        graph = ("peers/a/graph", {"ratio": 1.4})
        self.assertEqual(self.broken(("step/a/clip", {"floor_ratio": 1.0}), graph), [])

    def test_what_breaks_one_is_named_with_both_numbers(self):
        kept = ("step/b/clip", {"floor_ratio": 1.0})
        lines = self.broken(("step/a/clip+adam", {"floor_ratio": 1.85}), kept)
        self.assertEqual(lines, ["step/a/clip+adam: floor_ratio is 1.85, expected at most 1.06"])
        lines = self.broken(("peers/a/graph", {"ratio": 0.8}))
        self.assertEqual(lines, ["peers/a/graph: ratio is 0.8, expected at least 1.4"])
        lines = self.broken(("peers/a/graph", {"ratio": float("nan")}))
        self.assertEqual(len(lines), 1)

    def test_a_limit_that_meets_nothing_is_broken_where_its_program_ran(self):
        lines = self.broken(("step/a/adam", {"floor_ratio": 1.0}))
        self.assertEqual(len(lines), 1)
        self.assertIn("no measurement has floor_ratio", lines[0])
        self.assertEqual(len(self.broken(("step/a/clip", {"other": 1.0}))), 1)
        self.assertEqual(len(self.broken(("step/a/clip", {"floor_ratio": 1.0, "error_occurred": True}))), 0)

    def test_programs_that_did_not_run_are_passed_over(self):
        self.assertEqual(self.broken(("other/a", {"ratio": 0.0})), [])

    def run_limits(self, *arguments):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = limits.main([str(argument) for argument in arguments])
        return status, output.getvalue()

    def test_the_program_fails_where_one_is_broken_or_nothing_was_measured(self):
        self.assertEqual(self.run_limits(self.directory)[0], 1)
        self.measured(("replay/a", {"replay_cpu_us": 900.0}))
        status, text = self.run_limits(self.directory)
        self.assertEqual(status, 1)
        self.assertIn("replay/a: replay_cpu_us is 900, expected at most 5", text)
        self.measured(("replay/a", {"replay_cpu_us": 2.0}))
        self.assertEqual(self.run_limits(self.directory), (0, "1 measurements, no limits broken\n"))

    def test_the_committed_results_keep_them(self):
        status, text = self.run_limits()
        self.assertEqual(status, 0, text)


if __name__ == "__main__":
    unittest.main()
