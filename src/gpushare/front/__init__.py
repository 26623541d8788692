"""The front of the agent: holds its place at kubelet while a killed agent is replaced (ADR 0164).

A process of its own, in every GPU node's memory: it loads h2 and the standard library only, no gRPC, no asyncio.
"""
