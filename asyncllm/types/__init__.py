"""The types that every layer shares: parameters, prompts and outputs."""

from asyncllm.types.embedding import Pooling as Pooling
from asyncllm.types.outputs import Completion as Completion
from asyncllm.types.outputs import FinishReason as FinishReason
from asyncllm.types.outputs import Prompt as Prompt
from asyncllm.types.outputs import PromptLogprob as PromptLogprob
from asyncllm.types.outputs import Sink as Sink
from asyncllm.types.outputs import TokenDelta as TokenDelta
from asyncllm.types.outputs import TokenLogprob as TokenLogprob
from asyncllm.types.outputs import Usage as Usage
from asyncllm.types.outputs import is_chat as is_chat
from asyncllm.types.outputs import is_conversation as is_conversation
from asyncllm.types.outputs import is_single as is_single
from asyncllm.types.outputs import plain_prompt as plain_prompt
from asyncllm.types.params import MAX_BAD_WORD_LENGTH as MAX_BAD_WORD_LENGTH
from asyncllm.types.params import MAX_BAD_WORDS as MAX_BAD_WORDS
from asyncllm.types.params import MAX_CACHE_TTL as MAX_CACHE_TTL
from asyncllm.types.params import MAX_LOGIT_BIAS as MAX_LOGIT_BIAS
from asyncllm.types.params import MAX_LOGPROBS as MAX_LOGPROBS
from asyncllm.types.params import MAX_STOP_LENGTH as MAX_STOP_LENGTH
from asyncllm.types.params import MAX_STOP_STRINGS as MAX_STOP_STRINGS
from asyncllm.types.params import Int32 as Int32
from asyncllm.types.params import LogitParams as LogitParams
from asyncllm.types.params import Reasoning as Reasoning
from asyncllm.types.params import SamplingParams as SamplingParams
from asyncllm.types.params import SchedulingParams as SchedulingParams
