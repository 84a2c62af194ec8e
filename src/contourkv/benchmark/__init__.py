"""The downstream benchmark: what a byte of KV cache buys, method by method (paper, section 5).

Tasks are questions about a context (`tasks`, `hub`); `running` reads each context once, lets every method choose its
kept set at every budget, checks the bytes that are held and only then asks. What comes out is one parquet of questions
(`records`), from which comparisons, tables and verdicts are computed.
"""
