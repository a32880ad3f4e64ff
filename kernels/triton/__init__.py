"""The Triton kernels for CUDA devices, one op a file; the formulas are those of `kernels/reference.py`.

    rms_norm            RMSNorm, of x or of x + residual
    gated_activation    silu(gate) * up, gelu(gate) * up
    kv_write            rotate q and k, store k and v in their slots
    decode_attention    few query tokens a sequence: KV split over programs, second pass in split order
    prefill_attention   chunks of many tokens over their paged prefix
    attention_shapes    tile shapes and checks of both
    attention_tile      what both do with one split of the KV
    linear              matrix product with a fixed order of the sum, bias and residual
    fp8                 e4m3 of the KV cache
    step_batch          a step's sequences on the device
    kernel_set          what the engine asks of a kernel set, made of these
    sample              greedy, or temperature and Gumbel-max with Philox noise
    logit_edits         masks, bias and penalties before it
    token_filter        min-p, top-k, top-p
    philox              that noise
    logprobs            log-probabilities and ranks of chosen and likeliest tokens
    block_transfer      blocks out of the pool into one buffer and back
    device              which architecture a launcher runs on
    interpreter         the kernels on CPU tensors

Row invariance (DESIGN §4): tile shapes, split sizes and warps follow from the model's shape alone, never from the
number of rows or sequences, and arguments that follow the batch are `do_not_specialize`, so that every batch runs the
same binary. Products and sums are fused only where a kernel says `fma` (triton's default differs by version).
Without a GPU the kernels run on CPU tensors after `kernels.triton.interpreter.enable()`.
This file imports nothing, so that `kernels` needs no triton.
"""
