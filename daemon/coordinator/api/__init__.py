"""Servicers of gRPC and their interceptors."""
