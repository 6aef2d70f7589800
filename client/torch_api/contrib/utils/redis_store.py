"""``RedisStore``, under the path of the original."""

from bagua.torch_api.cache.redis_server import start_redis_server_cli
from bagua.torch_api.cache.redis_store import RedisStore, create_redis_client

__all__ = ["RedisStore", "create_redis_client", "start_redis_server_cli"]
