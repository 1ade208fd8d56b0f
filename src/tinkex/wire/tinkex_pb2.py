"""Made from tinkex.proto by scripts/generate_pb2.py. Do not edit."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory

_DESCRIPTOR = (
    b'\n\x18tinkex/wire/tinkex.proto\x12\x0btinkex.wire"\x85\x01\n\x06Tensor\x12\x0f\n\x05dense\x18\x01 \x01('
    b'\x0cH\x00\x12,\n\nsparse_csr\x18\x02 \x01(\x0b2\x16.tinkex.wire.SparseCsrH\x00\x12!\n\x05dtype\x18\x03 \x01(\x0e'
    b'2\x12.tinkex.wire.DType\x12\r\n\x05shape\x18\x04 \x03(\x03B\n\n\x08encoding"F\n\tSparseCsr\x12\x0e\n\x06'
    b'values\x18\x01 \x01(\x0c\x12\x14\n\x0ccrow_indices\x18\x02 \x01(\x0c\x12\x13\n\x0bcol_indices\x18\x03 \x01(\x0c""\n\x10Encod'
    b'edTextChunk\x12\x0e\n\x06tokens\x18\x01 \x01(\x0c"0\n\x0fImageDimensions\x12\r\n\x05width\x18\x01 \x01(\r\x12\x0e\n'
    b'\x06height\x18\x02 \x01(\r"\xb4\x01\n\nImageChunk\x12\x0c\n\x04data\x18\x01 \x01(\x0c\x12\x0e\n\x06format\x18\x02 \x01(\t\x12\x1c\n\x0fex'
    b'pected_tokens\x18\x03 \x01(\x05H\x00\x88\x01\x01\x12>\n\x13override_dimensions\x18\x04 \x01(\x0b2\x1c.tinkex.w'
    b'ire.ImageDimensionsH\x01\x88\x01\x01B\x12\n\x10_expected_tokensB\x16\n\x14_override_dimens'
    b'ions"\x19\n\tDmelChunk\x12\x0c\n\x04dmel\x18\x01 \x01(\x0c"\x99\x01\n\x05Chunk\x125\n\x0cencoded_text\x18\x01 \x01(\x0b2'
    b'\x1d.tinkex.wire.EncodedTextChunkH\x00\x12(\n\x05image\x18\x02 \x01(\x0b2\x17.tinkex.wire.Im'
    b'ageChunkH\x00\x12&\n\x04dmel\x18\x03 \x01(\x0b2\x16.tinkex.wire.DmelChunkH\x00B\x07\n\x05chunk"K\n\x14P'
    b'romptProvenanceSpan\x12\x13\n\x0bsequence_id\x18\x01 \x01(\t\x12\x0e\n\x06offset\x18\x02 \x01(\x03\x12\x0e\n\x06leng'
    b'th\x18\x03 \x01(\x03"L\n\x15SampledProvenanceSpan\x12\x13\n\x0bsequence_id\x18\x01 \x01(\t\x12\x0e\n\x06offset'
    b'\x18\x02 \x01(\x03\x12\x0e\n\x06length\x18\x03 \x01(\x03"\x92\x01\n\x0eProvenanceSpan\x12:\n\rprompt_tokens\x18\x01 \x01(\x0b'
    b'2!.tinkex.wire.PromptProvenanceSpanH\x00\x12<\n\x0esampled_tokens\x18\x02 \x01(\x0b2".'
    b'tinkex.wire.SampledProvenanceSpanH\x00B\x06\n\x04span"\xaa\x02\n\x05Datum\x12\'\n\x0bmodel_i'
    b'nput\x18\x01 \x03(\x0b2\x12.tinkex.wire.Chunk\x12<\n\x0eloss_fn_inputs\x18\x02 \x03(\x0b2$.tinkex.'
    b'wire.Datum.LossFnInputsEntry\x126\n\x11model_input_spans\x18\x03 \x03(\x0b2\x1b.tinkex'
    b'.wire.ProvenanceSpan\x128\n\x13loss_fn_input_spans\x18\x04 \x03(\x0b2\x1b.tinkex.wire.'
    b'ProvenanceSpan\x1aH\n\x11LossFnInputsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12"\n\x05value\x18\x02 \x01(\x0b2'
    b'\x13.tinkex.wire.Tensor:\x028\x01"<\n\x0fLossConfigValue\x12\x10\n\x06number\x18\x01 \x01(\x01H\x00\x12\x0e\n'
    b'\x04text\x18\x02 \x01(\tH\x00B\x07\n\x05value"\xb0\x03\n\x16ForwardBackwardRequest\x12\x10\n\x08model_id\x18\x01 '
    b'\x01(\t\x12\x0e\n\x06seq_id\x18\x02 \x01(\x05\x12 \n\x04data\x18\x03 \x03(\x0b2\x12.tinkex.wire.Datum\x12\x0f\n\x07loss_fn'
    b'\x18\x04 \x01(\t\x12M\n\x0eloss_fn_config\x18\x05 \x03(\x0b25.tinkex.wire.ForwardBackwardRequ'
    b'est.LossFnConfigEntry\x12\x14\n\x0cforward_only\x18\x06 \x01(\x08\x12R\n\x11loss_fn_config_v2'
    b'\x18\x07 \x03(\x0b27.tinkex.wire.ForwardBackwardRequest.LossFnConfigV2Entry\x1a'
    b'3\n\x11LossFnConfigEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\x01:\x028\x01\x1aS\n\x13LossFnCo'
    b'nfigV2Entry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12+\n\x05value\x18\x02 \x01(\x0b2\x1c.tinkex.wire.LossConfig'
    b'Value:\x028\x01"i\n\rBatchedTensor\x12\x0c\n\x04data\x18\x01 \x01(\x0c\x12\x0f\n\x07offsets\x18\x02 \x01(\x0c\x12!\n\x05dty'
    b'pe\x18\x03 \x01(\x0e2\x12.tinkex.wire.DType\x12\x16\n\x0etrailing_shape\x18\x04 \x03(\x03"\xb4\x01\n\x0bArrayRe'
    b'cord\x12\x10\n\x08type_tag\x18\x01 \x01(\t\x124\n\x06fields\x18\x02 \x03(\x0b2$.tinkex.wire.ArrayRecord'
    b'.FieldsEntry\x12\x12\n\nnum_datums\x18\x03 \x01(\x03\x1aI\n\x0bFieldsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12)\n\x05'
    b'value\x18\x02 \x01(\x0b2\x1a.tinkex.wire.BatchedTensor:\x028\x01"\xd9\x01\n\x15ForwardBackwardO'
    b'utput\x12\x1b\n\x13loss_fn_output_type\x18\x01 \x01(\t\x121\n\x0floss_fn_outputs\x18\x02 \x03(\x0b2\x18.ti'
    b'nkex.wire.ArrayRecord\x12@\n\x07metrics\x18\x03 \x03(\x0b2/.tinkex.wire.ForwardBack'
    b'wardOutput.MetricsEntry\x1a.\n\x0cMetricsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 '
    b'\x01(\x01:\x028\x01"N\n\x0cTopkLogprobs\x12\x11\n\ttoken_ids\x18\x01 \x01(\x0c\x12\x10\n\x08logprobs\x18\x02 \x01(\x0c\x12\t\n\x01'
    b'k\x18\x03 \x01(\r\x12\x0e\n\x06length\x18\x04 \x01(\r"\xcc\x01\n\x0fSampledSequence\x12,\n\x0bstop_reason\x18\x01 \x01(\x0e'
    b'2\x17.tinkex.wire.StopReason\x12\x0e\n\x06tokens\x18\x02 \x01(\x0c\x12\x15\n\x08logprobs\x18\x03 \x01(\x0cH\x00\x88\x01\x01'
    b'\x12=\n\x15topk_sampled_logprobs\x18\x04 \x01(\x0b2\x19.tinkex.wire.TopkLogprobsH\x01\x88\x01\x01B'
    b'\x0b\n\t_logprobsB\x18\n\x16_topk_sampled_logprobs"]\n\x0fPromptAltTokens\x12#\n\x06tok'
    b'ens\x18\x01 \x01(\x0b2\x13.tinkex.wire.Tensor\x12%\n\x08logprobs\x18\x02 \x01(\x0b2\x13.tinkex.wire.T'
    b'ensor"\x94\x03\n\x0eSampleResponse\x12/\n\tsequences\x18\x01 \x03(\x0b2\x1c.tinkex.wire.Sample'
    b'dSequence\x12\x1c\n\x0fprompt_logprobs\x18\x02 \x01(\x0cH\x00\x88\x01\x01\x12<\n\x14topk_prompt_logprobs\x18'
    b'\x03 \x01(\x0b2\x19.tinkex.wire.TopkLogprobsH\x01\x88\x01\x01\x12\x1f\n\x17prompt_cache_hit_tokens'
    b'\x18\x04 \x01(\x05\x128\n\x16target_prompt_logprobs\x18\x05 \x01(\x0b2\x13.tinkex.wire.TensorH\x02\x88\x01\x01'
    b'\x12<\n\x11prompt_alt_tokens\x18\x06 \x01(\x0b2\x1c.tinkex.wire.PromptAltTokensH\x03\x88\x01\x01B\x12'
    b'\n\x10_prompt_logprobsB\x17\n\x15_topk_prompt_logprobsB\x19\n\x17_target_prompt_lo'
    b'gprobsB\x14\n\x12_prompt_alt_tokens*:\n\nStopReason\x12\x14\n\x10STOP_REASON_STOP\x10\x00'
    b'\x12\x16\n\x12STOP_REASON_LENGTH\x10\x01*g\n\x05DType\x12\x15\n\x11DTYPE_UNSPECIFIED\x10\x00\x12\x11\n\rDTYP'
    b'E_FLOAT32\x10\x01\x12\x0f\n\x0bDTYPE_INT64\x10\x02\x12\x0f\n\x0bDTYPE_INT32\x10\x03\x12\x12\n\x0eDTYPE_BFLOAT16\x10'
    b'\x04b\x06proto3'
)

_FILE = descriptor_pool.Default().AddSerializedFile(_DESCRIPTOR)


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_FILE.message_types_by_name[name])


Tensor = _message("Tensor")
SparseCsr = _message("SparseCsr")
EncodedTextChunk = _message("EncodedTextChunk")
ImageDimensions = _message("ImageDimensions")
ImageChunk = _message("ImageChunk")
DmelChunk = _message("DmelChunk")
Chunk = _message("Chunk")
PromptProvenanceSpan = _message("PromptProvenanceSpan")
SampledProvenanceSpan = _message("SampledProvenanceSpan")
ProvenanceSpan = _message("ProvenanceSpan")
Datum = _message("Datum")
LossConfigValue = _message("LossConfigValue")
ForwardBackwardRequest = _message("ForwardBackwardRequest")
BatchedTensor = _message("BatchedTensor")
ArrayRecord = _message("ArrayRecord")
ForwardBackwardOutput = _message("ForwardBackwardOutput")
TopkLogprobs = _message("TopkLogprobs")
SampledSequence = _message("SampledSequence")
PromptAltTokens = _message("PromptAltTokens")
SampleResponse = _message("SampleResponse")
STOP_REASON_STOP = 0
STOP_REASON_LENGTH = 1
DTYPE_UNSPECIFIED = 0
DTYPE_FLOAT32 = 1
DTYPE_INT64 = 2
DTYPE_INT32 = 3
DTYPE_BFLOAT16 = 4
