"""Tensors of torch on the CPU: without copies, and layers of a session under torch.compile."""

import unittest

import torch
from served import WithService

from tributary import CacheSpec, Entry, StepEntry, errors, ops

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 64, 2


class Torch(WithService):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        spec = CacheSpec(LAYERS, HEADS, KV_HEADS, DIM, capacity_tokens=1 << 12, kv_dtype="bf16")
        cls.cache = cls.client.create_cache("torch", spec)

    def test_every_dtype_and_no_copy_of_the_output(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with self.subTest(dtype):
                q = torch.ones(2, HEADS, DIM, dtype=dtype)
                out = torch.zeros_like(q)
                call = [Entry(self.cache.open(), 0, 2, 2)]
                done = self.cache.attend(0, call, q, q[:, :KV_HEADS], q[:, :KV_HEADS], out=out)
                self.assertIs(done.output, out)
                torch.testing.assert_close(out, q)
                again = self.cache.attend(0, call, q, q[:, :KV_HEADS], q[:, :KV_HEADS]).output
                self.assertEqual((again.dtype, again.device), (dtype, q.device))

    def test_a_tensor_that_stands_for_its_negative(self):
        q, sequence = torch.zeros(1, HEADS, DIM), self.cache.open()
        v = torch.ones(1, KV_HEADS, DIM, dtype=torch.complex64).mul(1j).conj().imag  # -1, held as 1
        self.assertTrue(v.is_neg())
        k = torch.zeros(1, KV_HEADS, DIM)
        torch.testing.assert_close(self.cache.attend(0, [Entry(sequence, 0, 1, 1)], q, k, v).output, q - 1)
        with self.cache.session(max_rows=1) as session:
            number = session.submit([StepEntry(self.cache.open(), 0, 1, 1)], layers=1)
            torch.testing.assert_close(session.attend(q, k, v), q - 1)
            session.wait(number)
        out = torch.ones(1, HEADS, DIM, dtype=torch.complex64).conj().imag
        with self.assertRaises(errors.InvalidArgument) as caught:
            self.cache.attend(0, [Entry(sequence, 0, 1)], q, out=out)
        self.assertEqual(caught.exception.field, "out")

    def test_what_is_no_dense_tensor_of_this_machine_is_named(self):
        q, row = torch.ones(1, HEADS, DIM), [Entry(self.cache.open(), 0, 1)]
        for tensor, why in ((q.to_sparse(), "sparse"), (q.to("meta"), "meta")):
            with self.subTest(why), self.assertRaises(errors.InvalidArgument) as caught:
                self.cache.attend(0, row, tensor)
            self.assertEqual((caught.exception.field, why in str(caught.exception)), ("q", True), caught.exception)

    def test_a_session_takes_views_as_they_are(self):
        # As a model has them: [batch, heads, rows, dim] of a fused projection.
        fused = torch.randn(3, 1, (HEADS + 2 * KV_HEADS) * DIM).view(3, 1, -1, DIM).transpose(1, 2)
        q, k, v = fused.transpose(1, 2).flatten(0, 1).split([HEADS, KV_HEADS, KV_HEADS], 1)
        self.assertEqual(q.data_ptr(), fused.data_ptr())
        with self.cache.session(max_rows=3, lse=True) as session:
            number = session.submit([StepEntry(self.cache.open(), 0, 1, 1) for _ in range(3)], layers=1)
            lse = torch.empty(3, HEADS)
            output = session.attend(q, k, v, lse=lse)
            session.wait(number)
            with self.assertRaises(ValueError):
                session.attend(q.double(), k, v)
        torch.testing.assert_close(output, v.repeat_interleave(2, 1).contiguous(), atol=2e-2, rtol=1e-2)
        want = (q * k.repeat_interleave(2, 1)).sum(-1) / DIM**0.5
        torch.testing.assert_close(lse, want, atol=3e-2, rtol=1e-2)

    def test_a_session_with_outputs_of_another_type(self):
        x = torch.ones(2, HEADS, DIM, dtype=torch.bfloat16)
        for kind, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16), ("fp8_e4m3", torch.uint8)):
            with self.subTest(kind), self.cache.session(max_rows=2, dtype="bf16", output_dtype=kind) as session:
                number = session.submit([StepEntry(self.cache.open(), 0, 2, 2)], layers=2)
                output = session.attend(x, x[:, :KV_HEADS], x[:, :KV_HEADS])
                self.assertEqual((output.dtype, output.shape), (dtype, x.shape))
                into = torch.empty(x.shape, dtype=dtype if kind != "fp8_e4m3" else torch.float8_e4m3fn)
                self.assertIs(session.attend(x, x[:, :KV_HEADS], x[:, :KV_HEADS], out=into), into)
                session.wait(number)
                as_made = output.view(into.dtype)
                torch.testing.assert_close(as_made.float(), into.float(), atol=0, rtol=0)
                torch.testing.assert_close(into.float(), x.float())
                if kind != "bf16":
                    with self.assertRaises(ValueError):
                        ops.Handle(session)

    def test_under_compile_layers_keep_their_order_and_their_number(self):
        with self.cache.session(max_rows=2) as session:
            handle = ops.Handle(session)

            def model(x):
                outputs = []
                for layer in range(LAYERS):
                    q = (x * (layer + 1)).unsqueeze(1).expand(-1, HEADS, -1)
                    kv = q[:, :KV_HEADS]
                    outputs.append(ops.attend(handle, q, kv, kv))
                return outputs[0]  # that the second is not looked at must not lose it

            graphs = []

            def backend(graph, inputs):
                graphs.append(graph)
                return graph.forward

            compiled = torch.compile(model, backend=backend, fullgraph=True)
            compiled_by_aot = torch.compile(model, backend="aot_eager", fullgraph=True)
            sequence, x = self.cache.open(), torch.randn(1, DIM)
            for position, run in enumerate([model, compiled, compiled, compiled_by_aot, compiled_by_aot]):
                number = session.submit([StepEntry(sequence, position, 1, 1)], layers=LAYERS)
                output = run(x)
                session.wait(number)  # all its layers were handed over
                torch.testing.assert_close(output, x.expand(HEADS, -1).unsqueeze(0), atol=3e-2, rtol=1e-2)
            self.assertEqual(len(graphs), 1)  # compiled once
            # The second layer holds twice the first one's values.
            q = torch.zeros(1, HEADS, DIM)
            mean = self.cache.attend(1, [Entry(sequence, 4, 1)], q).output
            torch.testing.assert_close(mean[0, 0], 2 * x[0], atol=3e-2, rtol=1e-2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
