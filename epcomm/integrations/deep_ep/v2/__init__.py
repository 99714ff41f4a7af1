"""ElasticBuffer of DeepEP V2 on epcomm's buffers."""
