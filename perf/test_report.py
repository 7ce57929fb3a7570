"""report.py on small results."""

import contextlib
import importlib.util
import io
import json
import pathlib
import tempfile
import unittest

import report

CONTEXT = {"date": "2026-01-02T03:04:05+00:00", "gpu": "Some GPU", "driver": "1.2", "commit": "abc"}


def adam(name, **values):
    counters = {
        "median_us": 1000.0,
        "bytes_per_second": 4.0e12,
        "stream_bytes_per_second": 4.1e12,
        "stream_ratio": 0.99,
        "registers": 40,
        "tuned": 1,
    }
    return {"name": name, "run_type": "iteration", **counters, **values}


ADAM = [
    adam("adam/f32/f32/none/f32/f32/2x500000000", regular_ratio=1.002),
    adam("adam/bf16/bf16/remainder/e4m3/bf16/1x1000000000", tuned=0),
    {"name": "adam/f32/f32/none/f32/f32/9x9", "run_type": "iteration", "error_occurred": True},
]
REPLAY = [
    {
        "name": "replay/50000x1024",
        "run_type": "iteration",
        "replay_cpu_us": 2.512,
        "stream_cpu_us": 5.0,
        "replay_gpu_us": 400.0,
        "stream_gpu_us": 401.0,
        "latency_us": 410.0,
    }
]
PYTHON = [
    {
        "name": "python/5000x4096/stepgraph_replayed/fresh",
        "run_type": "iteration",
        "label": "stepgraph FusedAdam, replayed",
        "fresh_gradients": True,
        "cpu_time": 1234.56,
    }
]
PEERS = [
    {
        "name": "peers/adam/f32/2x500000000/pytorch_fused/f32",
        "run_type": "iteration",
        "label": "PyTorch fused",
        "real_time": 34000.0,
        "cpu_time": 800.0,
        "bytes_per_second": 3.4e12,
        "ratio": 1.2,
    },
    {"name": "peers/adam/f32/2x500000000/apex/f32", "error_occurred": True, "error_message": "not installed"},
]


class ReportTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = pathlib.Path(directory.name)
        self.gpu = self.root / "results" / "some-gpu"
        self.gpu.mkdir(parents=True)
        files = {"adam_bench": ADAM, "replay_bench": REPLAY, "fused_adam_bench": PYTHON, "peers_f32": PEERS}
        for program, benchmarks in files.items():
            content = {"context": CONTEXT, "benchmarks": benchmarks}
            (self.gpu / f"{program}.json").write_text(json.dumps(content))
        self.readme = self.root / "README.md"
        self.readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")

    def run_report(self, *arguments):
        paths = ["--results", str(self.root / "results"), "--readme", str(self.readme)]
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = report.main([*paths, *arguments])
        return status, output.getvalue()

    def test_prints_a_row_of_each_result_and_none_of_errors(self):
        status, text = self.run_report()
        self.assertEqual(status, 0)
        self.assertIn("Some GPU, driver 1.2, 2026-01-02.", text)
        self.assertIn("| f32 | f32 | none | f32 | 2 x 500,000,000 | 4 | 4,000 | 0.990 | 1.002 |", text)
        self.assertIn("| bf16 (generic kernel) | bf16 | remainder | e4m3, bf16 |", text)
        self.assertIn("| 50,000 x 1,024 | 2.51 | 5.00 | 400.0 | 401.0 | 410.0 |", text)
        self.assertIn("| 5,000 x 4,096 | stepgraph FusedAdam, replayed | fresh | 1,234.6 | - |", text)
        self.assertIn("| PyTorch fused | f32 | 34.000 | 3,400 | 800.0 | 1.20 |", text)
        self.assertNotIn("9 x 9", text)
        self.assertNotIn("apex", text)

    def test_rows_have_as_many_cells_as_their_headings(self):
        _, text = self.run_report()
        for block in text.split("\n\n"):
            counts = {line.count("|") for line in block.splitlines() if line.startswith("|")}
            self.assertLessEqual(len(counts), 1, block)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_update_writes_what_check_accepts_and_is_idempotent(self):
        self.assertEqual(self.run_report("--check")[0], 1)
        self.assertEqual(self.run_report("--update")[0], 0)
        self.assertEqual(self.run_report("--check")[0], 0)
        written = self.readme.read_text()
        picture = (self.gpu / "bandwidth.png").read_bytes()
        self.assertTrue(written.startswith("before\n") and written.endswith("after\n"))
        self.assertNotIn("old", written)
        self.assertEqual(self.run_report("--update")[0], 0)
        self.assertEqual(self.readme.read_text(), written)
        self.assertEqual((self.gpu / "bandwidth.png").read_bytes(), picture)

    def test_check_fails_when_a_result_changed(self):
        content = report.markdown([report.Results(self.gpu)], report.README_SECTIONS)
        self.readme.write_text(report.replace_between_markers(self.readme.read_text(), content))
        self.assertEqual(self.run_report("--check")[0], 0)
        changed = [adam("adam/f32/f32/none/f32/f32/2x500000000", stream_ratio=0.5)]
        (self.gpu / "adam_bench.json").write_text(json.dumps({"context": CONTEXT, "benchmarks": changed}))
        status, text = self.run_report("--check")
        self.assertEqual(status, 1)
        self.assertIn("--update", text)

    def test_results_without_markers_are_an_error(self):
        self.readme.write_text("no markers\n")
        self.assertEqual(self.run_report("--check")[0], 1)

    def test_nothing_to_report_is_no_error(self):
        for path in self.gpu.iterdir():
            path.unlink()
        self.readme.write_text("no markers\n")
        self.assertEqual(self.run_report("--check")[0], 0)


if __name__ == "__main__":
    unittest.main()
