"""The peer library on host memory, against AdamW written out in double precision."""

import array
import ctypes
import math
import random
import unittest

import stepgraph_peer


class Problem:
    """A few tensors in host memory, and the same numbers as Python floats."""

    def __init__(self, numels=(1000, 1, 4099), seed=1):
        generator = random.Random(seed)
        self.numels = list(numels)

        def make(low, high):
            return [array.array("f", (generator.uniform(low, high) for _ in range(n))) for n in numels]

        self.operands = {
            "parameter": make(-1, 1),
            "gradient": make(-0.01, 0.01),
            "exp_avg": make(-0.01, 0.01),
            "exp_avg_sq": make(0, 1e-4),
        }
        self.reference = {kind: [list(t) for t in tensors] for kind, tensors in self.operands.items()}

    def executor(self, library, signature="f32/f32/none/f32/f32", **options):
        addresses = {
            kind: [tensor.buffer_info()[0] for tensor in tensors] for kind, tensors in self.operands.items()
        }
        return stepgraph_peer.Executor(library, signature, self.numels, addresses, **options)

    def gradient_norm(self):
        return math.sqrt(sum(g * g for tensor in self.reference["gradient"] for g in tensor))

    def step_reference(self, t, learning_rate, weight_decay=0.0, scale=1.0, beta1=0.9, beta2=0.999, eps=1e-8):
        for p, g, m, v in zip(*(self.reference[kind] for kind in self.operands)):
            for i, stored in enumerate(g):
                gradient = stored * scale
                m[i] = beta1 * m[i] + (1 - beta1) * gradient
                v[i] = beta2 * v[i] + (1 - beta2) * gradient * gradient
                denominator = math.sqrt(v[i] / (1 - beta2**t)) + eps
                p[i] -= learning_rate * weight_decay * p[i] + learning_rate * m[i] / (1 - beta1**t) / denominator

    def largest_difference(self):
        return max(
            abs(ours - theirs)
            for tensor, reference in zip(self.operands["parameter"], self.reference["parameter"])
            for ours, theirs in zip(tensor, reference)
        )


class PeerLibraryTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.library = stepgraph_peer.Library()

    def test_steps_as_adamw_in_double(self):
        problem = Problem()
        executor = problem.executor(self.library, learning_rate=1e-2, weight_decay=0.1)
        for t in range(1, 4):
            executor.launch()
            problem.step_reference(t, 1e-2, weight_decay=0.1)
        self.assertLess(problem.largest_difference(), 1e-6)

    def test_new_learning_rate_reaches_the_next_launch(self):
        problem = Problem()
        executor = problem.executor(self.library, learning_rate=1e-2)
        executor.launch()
        problem.step_reference(1, 1e-2)
        executor.set_learning_rate(5e-2)
        executor.launch()
        problem.step_reference(2, 5e-2)
        self.assertLess(problem.largest_difference(), 1e-6)

    def test_clips_and_zeroes_gradients(self):
        problem = Problem()
        norm = problem.gradient_norm()
        executor = problem.executor(
            self.library, learning_rate=1e-2, max_grad_norm=norm / 2, zero_gradients=True
        )
        executor.launch()
        self.assertAlmostEqual(executor.grad_norm() / norm, 1.0, places=6)
        problem.step_reference(1, 1e-2, scale=0.5)
        self.assertLess(problem.largest_difference(), 2e-6)
        self.assertTrue(all(g == 0.0 for tensor in problem.operands["gradient"] for g in tensor))

    def test_failures_say_why(self):
        problem = Problem()
        with self.assertRaisesRegex(stepgraph_peer.StepgraphError, "f31"):
            problem.executor(self.library, signature="f31/f32/none/f32/f32", learning_rate=1e-3)
        with self.assertRaisesRegex(stepgraph_peer.StepgraphError, "learning"):
            problem.executor(self.library, learning_rate=float("nan"))
        problem.operands["gradient"] = []
        with self.assertRaisesRegex(stepgraph_peer.StepgraphError, "gradient"):
            problem.executor(self.library, learning_rate=1e-3)

    def test_knows_the_size_of_gpt2_where_lists_are_built_in(self):
        try:
            numels = self.library.parameter_list("gpt2-124m")
        except stepgraph_peer.StepgraphError as error:
            self.skipTest(str(error))
        self.assertEqual(len(numels), 148)
        self.assertEqual(sum(numels), 124439808)

    def test_structures_have_the_sizes_that_the_library_asserts(self):
        self.assertEqual(ctypes.sizeof(stepgraph_peer._Tensors), 56)
        self.assertEqual(ctypes.sizeof(stepgraph_peer._Options), 64)


if __name__ == "__main__":
    unittest.main()
