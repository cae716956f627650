"""The exchange of one step: engine, wire format, transports, states."""
