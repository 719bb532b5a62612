"""Kernels are classified by names as CUPTI reports them, and by the operators around them."""

from __future__ import annotations

import ast

import pytest

from cppmega.runs.profile import short
from cppmega.training import kernel_kinds
from cppmega.training.kernel_kinds import Kinds, own_kernels
from cppmega.training.trace import Span, Trace, Work
from tests.support import REPOSITORY

AT = "void at::native::"
CUB = "void at_cuda_detail::cub::detail::radix_sort::"
COPY = "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const"
TE = "void transformer_engine::"

KERNELS = {
    "products": [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
        "ampere_sgemm_128x64_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(int)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16>(int, int)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>()",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*)",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<X> > >()",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>",
        "fmha_cutlassB_bf16_aligned_128x128_k128_sm80(PyTorchMemEffAttention::Params)",
    ],
    "TileLang": [
        "main_kernel",
        "tl_indexer_fwd_kernel_kernel",
        "tl_indexer_bwd_kernel_kernel",
        "clean_logits_kernel_kernel",
        "preprocess_kernel_kernel",
        "sparse_mla_bwd_kernel_kernel",
    ],
    "cppmega: dsa attention": ["_forward_kernel"],
    "cppmega: dsa indexer": ["_choose_kernel"],
    "cppmega: pointwise": ["_prologue_kernel", "_transform_kernel"],
    "cppmega: mamba3": ["values_kernel", "rows_kernel", "rows_sm90_kernel"],
    "cppmega: linear cross entropy": ["_row_kernel"],
    "products of the experts": [
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::"
        "GroupProblemShape<cute::tuple<int, int, int> >, X> >()",
    ],
    "copies, casts, concatenations": [
        AT + f"elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::{COPY}>>",
        AT + f"unrolled_elementwise_kernel<at::native::{COPY}, std::array<char*, 2ul>, 4>",
        AT + "vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda("
        "at::TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul> >",
        AT + "(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::(anonymous namespace)::"
        "OpaqueType<2u>, unsigned int, 2, 128, 1>",
        TE + "detail::(anonymous namespace)::cast_transpose_fused_kernel_notaligned<false>",
        TE + "(anonymous namespace)::transpose_general_kernel<8, 8, __nv_bfloat16>",
    ],
    "elementwise": [
        AT + "vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, "
        "std::array<char*, 3ul> >",
        AT + "elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
        "BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> > >>",
        AT + "elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::(anonymous "
        "namespace)::where_kernel_impl(at::TensorIterator&)::{lambda()#1}>>",
        "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::"
        "arange_cuda_out(c10::Scalar const&)>",
        AT + "(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, at::"
        "native::templates::cuda::normal_and_transform<float> >",
        AT + "triu_tril_kernel<bool, long, true, 8, false>",
        "triton_poi_fused_add_mul_silu_0",
        "rotary_fwd_q_kernel",
    ],
    "memory copies and fills": [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        AT + "vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
        "std::array<char*, 1ul> >",
    ],
    "reductions and norms": [
        AT + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
        AT + "(anonymous namespace)::cunn_SoftMaxForwardSmem<8, c10::BFloat16, float>",
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 8, false, true>",
        AT + "(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::Half, float>",
        AT + "tensor_kernel_scan_innermost_dim_with_indices<float, std::less_equal<float> >",
        TE + "normalization::rmsnorm_fwd_tuned_kernel<transformer_engine::normalization::X>",
        TE + "normalization::rmsnorm_bwd_finalize_tuned_kernel<X>",
        "triton_red_fused_mean_pow_0",
    ],
    "indexing and permutation": [
        AT + "index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::"
        "index_put_kernel_impl<at::native::OpaqueType<2> >>>",
        AT + "vectorized_gather_kernel<16, int>(char*, char*, int*, int, long)",
        AT + "_scatter_gather_elementwise_kernel<128, 8, at::native::"
        "_cuda_scatter_gather_internal_kernel<true, float, long>>",
        AT + "(anonymous namespace)::embedding_backward_feature_kernel<c10::BFloat16, float, long>",
        "void (anonymous namespace)::indexing_backward_kernel<c10::BFloat16, 4>(long const*)",
        AT + "indexFuncLargeIndex<c10::BFloat16, long, unsigned long, -1, -1, -1, true>",
        "_permute_kernel",
        "_unpermute_kernel",
        "_row_id_map_pass_1_kernel",
        "_sort_chunks_by_map_kernel",
        AT + "(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>(long const*)",
        AT + "(anonymous namespace)::krn_partials_per_segment<long>(long*, long const*)",
        AT + "roll_cuda_kernel<long>(long const*, long*, long, long)",
        "void at_cuda_detail::cub::detail::unique_by_key::DeviceUniqueByKeySweepKernel<"
        "at_cuda_detail::cub::detail::unique_by_key::policy_hub<long, int>::Policy1000>",
    ],
    "sorting and top-k": [
        AT + "sbtopk::gatherTopK<float, unsigned int, 2, false>",
        AT + "mbtopk::computeBlockDigitCounts<c10::BFloat16, unsigned long, unsigned int, -1>",
        AT + "bitonicSortKVInPlace<-1, -1, 16, 16, float, long>",
        AT + "radixSortKVInPlace<-1, -1, 16, 2, bool, long, unsigned long>",
        CUB + "DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::detail::radix::policy_hub<int>>",
    ],
    "optimizer": [
        TE + "multi_tensor_apply_kernel<TensorListMetadata<5>, AdamFunctorMaster<X> >",
        AT + "(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<5>, FusedAdamMathFunctor<c10::BFloat16, 5> >",
    ],
    "communication": [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ],
    "state-space scans": [
        "_chunk_scan_fwd_kernel",
        "_state_passing_bwd_kernel",
        "_bmm_chunk_fwd_kernel",
        "void causal_conv1d_channellast_fwd_kernel<Causal_conv1d_kernel_traits<128, 4> >",
    ],
    "other": ["void somebody::new_thing<3>()", "hypercube"],
}


def work(name: str, *inside: str) -> Work:
    return Work(Span(0, 1, name), inside=inside)


def kind(name: str, *inside: str, beside: tuple[str, ...] = ()) -> str:
    trace = Trace("GPU", (), (work("x", *beside),))
    return Kinds(trace).of(work(name, *inside))


@pytest.mark.parametrize("expected", KERNELS)
def test_kernels_as_they_are_named(expected: str) -> None:
    assert {name: kind(name) for name in KERNELS[expected]} == dict.fromkeys(
        KERNELS[expected], expected
    )


def test_products_are_told_apart_by_what_launched_them() -> None:
    gemm = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"
    assert kind(gemm, "_GroupedLinear", "aten::mm") == "products of the experts"
    assert kind(gemm, "_GroupedLinearBackward") == "products of the experts"
    assert kind(gemm, "DeferredScalar", "aten::mm") == "products of the heads"
    assert kind(gemm, "_Linear") == "products"
    mine = "LinearWithGradAccumulationAndAsyncCommunication"
    for name in (mine, mine + "Backward"):
        assert kind(gemm, name, beside=("_LayerNormLinear",)) == "products of the heads"
        assert kind(gemm, name) == "products", "every layer is one of these"
    assert kind("Memset (Device)", "DeferredScalar") == "memory copies and fills"


def test_kernels_of_one_name_are_told_apart_by_what_launched_them() -> None:
    assert kind("_backward_kernel", "_M2RNNBackward", "cppmega::m2rnn_backward") == "cppmega: m2rnn"
    assert kind("_forward_kernel", "cppmega::packed_conv") == "cppmega: packed conv"
    assert kind("row_sums_kernel", "cppmega::table_rows_sum") == "cppmega: ngram hash"
    assert kind("row_sums_kernel", "cppmega::embedding_rows_add") == "cppmega: pointwise"
    routers = kind("_gradients_kernel", "cppmega::router_gating_gradients")
    assert routers == "cppmega: pointwise"
    assert kind("_backward_kernel", "_AbsorbedBackward") == "cppmega: dsa attention"


def test_one_family_at_most_of_a_shared_name_has_no_operator_to_be_told_by() -> None:
    told = set(kernel_kinds._AROUND.values())
    for name, families in own_kernels().items():
        assert {*families[1:]} <= told | {"common", "dsa_indexer"}, name


def test_whatever_runs_in_the_optimizer_is_the_optimizers() -> None:
    inside = "Optimizer.step#FusedAdam.step"
    assert kind("void at::native::elementwise_kernel<4>", inside) == "optimizer"


def test_the_kernels_of_the_package_are_known_from_its_sources() -> None:
    launched: set[str] = set()
    for file in (REPOSITORY / "cppmega" / "ops").glob("*/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            # kernel[grid](...)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                called = node.func.value
                if isinstance(called, ast.Name) and called.id.endswith("_kernel"):
                    launched.add(called.id)
    assert launched and launched <= own_kernels().keys()


def test_names_are_shortened_to_what_tells_them_apart() -> None:
    copies = KERNELS["copies, casts, concatenations"]
    assert short(copies[0]) == "elementwise_kernel<direct_copy_kernel_cuda>"
    assert short(copies[3]) == "CatArrayBatchedCopy_contig"
    assert short("nvjet_tst_128x256") == "nvjet_tst_128x256"
    assert short("Memcpy DtoD (Device -> Device)") == "Memcpy DtoD (Device -> Device)"
    assert len(short("k" * 500)) == 60
