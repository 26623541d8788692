"""The agent's front: keeps its registration at kubelet while a killed agent is replaced (ADR 0164).

It is a process of its own in every GPU node's memory, so it loads only h2 and the standard library, no gRPC or
asyncio.
"""
