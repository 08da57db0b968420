"""Tests of other projects that pass with the stock framework and not with CommFuse, each with its reason.

Keys: file::class::test, patterns of fnmatch (with [ written as [[]). What stands here and passes fails `make peer-suites`, too.
"""

from __future__ import annotations

EXPECTED: dict[str, dict[str, str]] = {
    "fsdp2": {
        "test_fully_shard_training.py::*::test_partial_group_forward_then_standalone": (
            "legal rounding: one of 512 elements of a gradient summed over chunks differs by 1.08e-5, and 1e-5 is allowed"
        ),
        "test_fully_shard_training.py::*::test_train_parity_with_activation_checkpointing": (
            "legal rounding: one of 128 elements of a gradient differs by 1.34e-5, and 1e-5 is allowed"
        ),
        "test_fully_shard_training.py::*::test_register_fsdp_forward_method": (
            "legal rounding: the gradient of a convolution below a fused layer differs by 5.5e-5, 1e-5 is allowed; "
            "from float64 CommFuse's is off by 6.1e-5 at most, stock's by 6.6e-5"
        ),
        "test_fully_shard_mixed_precision.py::*::test_compute_dtype": (
            "expects stock's rounding of gradients in the low precision; CommFuse's result is nearer to "
            "float64: relative error 1.0e-3 against 1.8e-3 (bf16), 1.4e-4 against 1.9e-4 (fp16)"
        ),
        "test_fully_shard_mixed_precision.py::*::test_reduce_dtype": (
            "as test_compute_dtype: relative error 0.8e-3 against 1.4e-3 (fp32 reduced in bf16)"
        ),
        "test_fully_shard_mixed_precision.py::*::test_no_warmup_jvp_reshard_after_forward_false": (
            "these tests call apply() in the first forward, here inside torch.func.jvp, where it is refused"
        ),
        "test_fully_shard_training.py::*::test_shared_params_separate_fsdp_groups_error": (
            "the same refusal, a ValueError, comes from apply() and in its words"
        ),
        "test_fully_shard_init.py::*::test_invalid_meta_device_init": (
            "the same refusal, a RuntimeError that begins alike, names parameters of all layers, not of one FSDP2 group only"
        ),
        "test_fully_shard_training.py::*::test_share_comm_context": "counts the streams of FSDP2's own all-gathers",
        "test_fully_shard_training.py::*::test_train_parity_single_worldsize1": (
            "counts collectives in the first step, in which these tests call apply(), whose ranks compare their settings"
        ),
        "test_fully_shard_training.py::*::test_gradient_accumulation": (
            "counts FSDP2's collectives; without these three assertions it passes, over one mesh dimension and with replicas"
        ),
        **{
            f"test_fully_shard_comm.py::TestFullyShardCommunication::{test}": "counts FSDP2's all-gathers and reduce-scatters"
            for test in (
                "test_fully_shard_communication_count",
                "test_manual_reshard_with_reshard_after_forward_false",
                "test_set_reshard_after_forward",
            )
        },
        **{
            f"test_fully_shard_comm.py::TestFullyShardPrefetch::{test}": (
                "compares the order in which FSDP2 unshards its groups; those that CommFuse serves have nothing to unshard"
            )
            for test in (
                "test_fully_shard_backward_prefetch",
                "test_fully_shard_multi_module_backward_prefetch",
                "test_fully_shard_multi_module_unused_module",
                "test_set_modules_to_backward_prefetch",
                "test_set_modules_to_backward_prefetch_inside_ac",
                "test_set_modules_to_forward_prefetch",
            )
        },
    },
    "deepspeed": {
        "test_zero_linear_direct_init.py::*::test_wrapper_and_parameter_storage_lifecycle": (
            "watches the weight that ZeRO-3's memory-efficient linear saves for backward; CommFuse's linear saves none"
        ),
        "test_zero_coalesce_grad_reduction.py::*::test_multi_bucket_flush[[]2]": (
            "legal rounding: expects bf16 sums of one order to the last bit, of layers that are used three times; 10 of 16,384 "
            "gradients that nearly cancel differ, and Adam's first step takes their signs"
        ),
        **{
            f"test_zero_autocast.py::*::{test}[[]dtype0-[123]-True]": (
                "asks whether a module's class is nn.Linear itself; that of a served layer is a subclass of it"
            )
            for test in ("test", "test_safe_modules_conf", "test_lower_precision_model")
        },
    },
}
