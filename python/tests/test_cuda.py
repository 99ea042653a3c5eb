"""Hosts whose model is on a GPU: sessions in torch's current stream, CUDA graphs, torch.compile, and whole models.

Skipped without a GPU. The service has a GPU worker; without MPS the two processes take turns, which is slow.
"""

import os
import unittest

import torch
from served import WithService

from tributary import CacheSpec, Entry, StepEntry, ops

HEADS, KV_HEADS, DIM, LAYERS = 8, 2, 64, 2
GPU = torch.cuda.is_available()
# Of logits, whose spread is about 10: kernels on GPUs take queries of float32 as bfloat16. Most are as near as NEAR, none
# is farther than FAR.
NEAR, FAR = 0.3, 2.0


@unittest.skipUnless(GPU, "there is no GPU")
class Sessions(WithService):
    SERVICE = {"device": "cuda", "workers": 1, "program": ""}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        spec = CacheSpec(LAYERS, HEADS, KV_HEADS, DIM, capacity_tokens=1 << 13, kv_dtype="bf16")
        cls.cache = cls.client.create_cache("cuda", spec)

    def tensors(self, rows, seed):
        dice = torch.Generator(device="cuda").manual_seed(seed)
        like = {"device": "cuda", "dtype": torch.bfloat16, "generator": dice}
        return tuple(torch.randn(rows, heads, DIM, **like) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def by_calls(self, steps):
        """What calls give for the same tokens in a sequence of their own: [step][layer]."""
        sequence, at, outputs = self.cache.open(), 0, []
        for layers in steps:
            rows = layers[0][0].shape[0]
            outputs.append([
                self.cache.attend(layer, [Entry(sequence, at, rows, rows)], *(t.cpu() for t in tensors)).output.cuda()
                for layer, tensors in enumerate(layers)])
            at += rows
        return outputs

    def test_in_the_current_stream(self):
        steps = [[self.tensors(rows, 10 * i + layer) for layer in range(LAYERS)] for i, rows in enumerate((7, 1, 1, 3))]
        wanted = self.by_calls(steps)
        with self.cache.session(max_rows=8, dtype="bf16", memory="device") as session:
            self.assertEqual(session.memory, "device")
            sequence, at = self.cache.open(), 0
            side = torch.cuda.Stream()
            for layers, want in zip(steps, wanted):
                rows = layers[0][0].shape[0]
                number = session.submit([StepEntry(sequence, at, rows, rows)], layers=LAYERS)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    outputs = [session.attend(*tensors) for tensors in layers]
                session.wait(number)
                side.synchronize()
                session.check()
                for mine, theirs in zip(outputs, want):
                    torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)
                at += rows

    def test_in_a_cuda_graph_and_under_compile(self):
        steps = [[self.tensors(1, 100 + 10 * i + layer) for layer in range(LAYERS)] for i in range(8)]
        wanted = self.by_calls(steps)
        with self.cache.session(max_rows=1, dtype="bf16", memory="device") as session:
            handle = ops.Handle(session, "cuda")
            inputs = [[t.clone() for t in tensors] for tensors in steps[0]]

            def model(*tensors):
                # What a model does between two layers' attention, so that a compiler has something to fuse.
                first = ops.attend(handle, *tensors[:3])
                return first, ops.attend(handle, *tensors[3:]) + 0 * first

            compiled = torch.compile(model, fullgraph=True)
            graph = None
            sequence = self.cache.open()
            for at, (layers, want) in enumerate(zip(steps, wanted)):
                for place, tensors in zip(inputs, layers):
                    for mine, theirs in zip(place, tensors):
                        mine.copy_(theirs)
                number = session.submit([StepEntry(sequence, at, 1, 1)], layers=LAYERS)
                flat = [t for place in inputs for t in place]
                if at == 0:
                    outputs = model(*flat)
                elif at < 3 and os.environ.get("TRIBUTARY_TEST_COMPILE", "1") == "1":
                    outputs = compiled(*flat)
                elif graph is None:
                    graph = torch.cuda.CUDAGraph()
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph):  # which launches nothing
                        captured = model(*flat)
                    graph.replay()
                    outputs = captured
                else:
                    graph.replay()
                    outputs = captured
                session.wait(number)
                torch.cuda.synchronize()
                for mine, theirs in zip(outputs, want):
                    torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)


@unittest.skipUnless(GPU, "there is no GPU")
class Models(WithService):
    SERVICE = {"device": "cuda", "workers": 1, "program": ""}

    @classmethod
    def setUpClass(cls):
        import test_transformers  # pylint: disable=import-outside-toplevel

        cls.tests = test_transformers
        super().setUpClass()

    def compared(self, name, tokens=24, config=(), **options):
        tests = self.tests
        model = tests.family(name, **dict(config)).cuda()
        for lengths in ([17], [21, 3, 30, 1]):
            inputs = {key: tensor.cuda() for key, tensor in tests.prompts(lengths).items()}
            want = tests.eager(model, inputs, tokens)
            before = torch.cuda.memory_allocated()
            with tests.attach(model, self.client, capacity_tokens=1 << 13, **options) as attachment:
                got = tests.text(model, inputs, tokens)
                self.assertTrue(all(session.memory == "device" for session in attachment._steps._idle))
                if options.get("cuda_graphs"):
                    self.assertIsNotNone(attachment._graphs._graphs.get(len(lengths)))
                attachment.held.delete()
            for step, (mine, theirs) in enumerate(zip(got.logits, want.logits)):
                apart = (mine - theirs).abs()
                said = f"{name}, {len(lengths)} rows, step {step}: {apart.flatten().topk(8).values.tolist()}"
                self.assertLess(apart.max(), FAR, said)
                self.assertLess((apart > NEAR).float().mean(), 0.05, said)
                place = len(inputs["input_ids"][0]) + step
                if not torch.equal(got.sequences[:, place], want.sequences[:, place]):
                    break
            self.assertGreater(step, 0)
            del got, want
            if not options.get("cuda_graphs"):  # whose workspaces are torch's
                self.assertLess(torch.cuda.memory_allocated() - before, 1 << 20)

    def test_llama(self):
        self.compared("Qwen3")

    def test_windows_soft_caps_and_sinks(self):
        self.compared("Gemma2")
        # Of all experts: a choice among them may fall otherwise for the smallest difference.
        self.compared("GptOss", config={"num_experts_per_tok": 4})

    def test_passes_as_cuda_graphs(self):
        self.compared("Qwen3", cuda_graphs=True)
        self.compared("Gemma3Text", cuda_graphs=True)

    def test_parts_made_by_torch_compile(self):
        self.compared("Qwen3", cuda_graphs=True, fuse=True)

    def test_continuous_batching(self):
        tests = self.tests
        model = tests.family("Qwen3").cuda()
        with tests.attach(model, self.client, capacity_tokens=1 << 13) as attachment:
            results = tests.Batching.batch(self, model, tests.Batching.REQUESTS)
            alone = [tests.text(model, {"input_ids": torch.tensor([list(prompt)], device="cuda")}, 12)
                     for prompt in tests.Batching.REQUESTS]
            attachment.held.delete()
        for result, want, prompt in zip(results.values(), alone, tests.Batching.REQUESTS):
            self.assertEqual(result.generated_tokens[0], want.sequences[0, len(list(prompt))].item())


if __name__ == "__main__":
    unittest.main(verbosity=2)
