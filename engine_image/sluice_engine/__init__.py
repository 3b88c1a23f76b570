"""One vLLM engine behind the engine stream: the serving process, and the plugin that runs inside vLLM's EngineCore."""
