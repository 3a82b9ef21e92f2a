"""The options of the engine, which every layer knows.

Those of a server are in ``server_config``, those of Ray in ``ray_config``.
"""

from asyncllm.config.engine_config import MIN_CACHE as MIN_CACHE
from asyncllm.config.engine_config import AttentionName as AttentionName
from asyncllm.config.engine_config import EngineConfig as EngineConfig
from asyncllm.config.engine_config import PolicyName as PolicyName
from asyncllm.config.engine_limits import EngineLimits as EngineLimits
from asyncllm.config.speculative_config import HEADS as HEADS
from asyncllm.config.speculative_config import SpeculativeConfig as SpeculativeConfig
from asyncllm.config.speculative_config import most_drafted as most_drafted
from asyncllm.config.speculative_config import parse_speculative as parse_speculative
from asyncllm.config.speculative_config import speculation_of as speculation_of
from asyncllm.config.speculative_config import synthetic_rate as synthetic_rate
