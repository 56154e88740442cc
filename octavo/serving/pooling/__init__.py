"""The routes of embedding, classification and scoring models, in forms of OpenAI, Cohere, Jina and vLLM."""
