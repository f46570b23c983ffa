//! The tensors of a model by role, and their names.

/// Purpose of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Embedding table; also the output head, unless the model has its own.
    Embed,
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
    InputNorm,
    PostAttnNorm,
    PreFfnNorm,
    PostFfnNorm,
    /// Norm of each head of queries.
    QNorm,
    KNorm,
    FinalNorm,
    /// Output head that is not the embedding table.
    Head,
    /// Factor of the residual stream after a layer, one number.
    LayerScale,
    /// Matrix from a token's embedding and a state of the target to the input of an assistant's
    /// layers.
    PreProjection,
    /// Matrix from the assistant's last hidden state to the next state.
    PostProjection,
    /// Matrix that scores the experts of a layer.
    Router,
    /// Factors of the router's input.
    RouterScale,
    /// Factor of each expert's output.
    ExpertFactors,
    /// Norm before the experts.
    PreExpertNorm,
    /// Gate and up matrices of all experts, stacked vertically.
    ExpertGateUp,
    /// Separate gate and up matrices, as in some GGUF files.
    ExpertGate,
    ExpertUp,
    ExpertDown,
    /// Norm after the MLP next to the experts; `PostExpertNorm` follows the experts.
    PostSharedNorm,
    PostExpertNorm,
}

impl Role {
    pub const ALL: [Role; 29] = [
        Role::Embed,
        Role::Q,
        Role::K,
        Role::V,
        Role::O,
        Role::Gate,
        Role::Up,
        Role::Down,
        Role::InputNorm,
        Role::PostAttnNorm,
        Role::PreFfnNorm,
        Role::PostFfnNorm,
        Role::QNorm,
        Role::KNorm,
        Role::FinalNorm,
        Role::Head,
        Role::LayerScale,
        Role::PreProjection,
        Role::PostProjection,
        Role::Router,
        Role::RouterScale,
        Role::ExpertFactors,
        Role::PreExpertNorm,
        Role::ExpertGateUp,
        Role::ExpertGate,
        Role::ExpertUp,
        Role::ExpertDown,
        Role::PostSharedNorm,
        Role::PostExpertNorm,
    ];

    pub fn is_matrix(self) -> bool {
        use Role::*;
        matches!(
            self,
            Embed
                | Q
                | K
                | V
                | O
                | Gate
                | Up
                | Down
                | Head
                | PreProjection
                | PostProjection
                | Router
                | ExpertGateUp
                | ExpertGate
                | ExpertUp
                | ExpertDown
        )
    }

    pub fn is_norm(self) -> bool {
        use Role::*;
        !self.is_matrix() && !matches!(self, LayerScale | RouterScale | ExpertFactors)
    }

    /// Returns whether it is a matrix with one part per expert.
    pub fn is_of_experts(self) -> bool {
        use Role::*;
        matches!(self, ExpertGateUp | ExpertGate | ExpertUp | ExpertDown)
    }

    /// Returns whether it belongs to a layer.
    pub fn is_layer(self) -> bool {
        use Role::*;
        !matches!(self, Embed | FinalNorm | Head | PreProjection | PostProjection)
    }

    /// Returns the name of a tensor in recipes: Hugging Face's name without the model's prefix and
    /// `.weight`.
    pub fn short_name(self, layer: usize) -> String {
        let name = self.suffix().trim_end_matches(".weight");
        if self.is_layer() { format!("layers.{layer}.{name}") } else { name.to_owned() }
    }

    /// Returns the short name without layer and block, such as `q_proj` or `experts.down_proj`.
    pub fn name(self) -> &'static str {
        let name = self.suffix().trim_end_matches(".weight");
        name.trim_start_matches("self_attn.").trim_start_matches("mlp.")
    }

    /// Returns the end of Hugging Face's name, after the model's prefix and, for a layer's tensor,
    /// after `layers.N.`.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Role::Embed => "embed_tokens.weight",
            Role::Q => "self_attn.q_proj.weight",
            Role::K => "self_attn.k_proj.weight",
            Role::V => "self_attn.v_proj.weight",
            Role::O => "self_attn.o_proj.weight",
            Role::Gate => "mlp.gate_proj.weight",
            Role::Up => "mlp.up_proj.weight",
            Role::Down => "mlp.down_proj.weight",
            Role::InputNorm => "input_layernorm.weight",
            Role::PostAttnNorm => "post_attention_layernorm.weight",
            Role::PreFfnNorm => "pre_feedforward_layernorm.weight",
            Role::PostFfnNorm => "post_feedforward_layernorm.weight",
            Role::QNorm => "self_attn.q_norm.weight",
            Role::KNorm => "self_attn.k_norm.weight",
            Role::FinalNorm => "norm.weight",
            Role::Head => "lm_head.weight",
            Role::LayerScale => "layer_scalar",
            Role::PreProjection => "pre_projection.weight",
            Role::PostProjection => "post_projection.weight",
            Role::Router => "router.proj.weight",
            Role::RouterScale => "router.scale",
            Role::ExpertFactors => "router.per_expert_scale",
            Role::PreExpertNorm => "pre_feedforward_layernorm_2.weight",
            Role::ExpertGateUp => "experts.gate_up_proj",
            Role::ExpertGate => "experts.gate_proj",
            Role::ExpertUp => "experts.up_proj",
            Role::ExpertDown => "experts.down_proj",
            Role::PostSharedNorm => "post_feedforward_layernorm_1.weight",
            Role::PostExpertNorm => "post_feedforward_layernorm_2.weight",
        }
    }
}
