"""Releases over HTTP: routes for any FastAPI application, and the server of ``dpicl serve``."""

from langchain_dpicl.serving.routes import add_dp_routes

__all__ = ["add_dp_routes"]
