#include "matrix.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <memory>
#include <ostream>
#include <sstream>
#include <stdexcept>

Matrix::Matrix(std::size_t rows, std::size_t columns, double value)
    : rows_(rows), columns_(columns), values_(rows * columns, value) {
    if (rows == 0 || columns == 0) {
        throw std::invalid_argument("a matrix has at least one row and one column");
    }
}

Matrix Matrix::parse(const std::string& text) {
    std::vector<std::vector<double>> rows;
    std::istringstream lines(text);
    std::string line;
    while (std::getline(lines, line, ';')) {
        std::istringstream words(line);
        std::vector<double> row;
        double value = 0;
        while (words >> value) {
            row.push_back(value);
        }
        if (!words.eof()) {
            throw std::invalid_argument("'" + line + "' is no row of numbers");
        }
        rows.push_back(row);
    }
    if (rows.empty()) {
        throw std::invalid_argument("the text is empty");
    }
    Matrix matrix(rows.size(), rows[0].size());
    for (std::size_t r = 0; r < rows.size(); ++r) {
        if (rows[r].size() != matrix.columns()) {
            throw std::invalid_argument("the rows have different lengths");
        }
        for (std::size_t c = 0; c < matrix.columns(); ++c) {
            matrix.at(r, c) = rows[r][c];
        }
    }
    return matrix;
}

Matrix Matrix::identity(std::size_t size) {
    Matrix matrix(size, size);
    for (std::size_t i = 0; i < size; ++i) {
        matrix.at(i, i) = 1;
    }
    return matrix;
}

double& Matrix::at(std::size_t row, std::size_t column) {
    if (row >= rows_ || column >= columns_) {
        throw std::out_of_range("no such element");
    }
    return values_[row * columns_ + column];
}

double Matrix::at(std::size_t row, std::size_t column) const {
    return const_cast<Matrix*>(this)->at(row, column);
}

Matrix Matrix::transposed() const {
    Matrix result(columns_, rows_);
    for (std::size_t r = 0; r < rows_; ++r) {
        for (std::size_t c = 0; c < columns_; ++c) {
            result.at(c, r) = at(r, c);
        }
    }
    return result;
}

Matrix Matrix::plus(const Matrix& other) const {
    if (rows_ != other.rows_ || columns_ != other.columns_) {
        throw std::invalid_argument("a sum needs two matrices of one size");
    }
    Matrix result(*this);
    std::transform(values_.begin(), values_.end(), other.values_.begin(), result.values_.begin(),
                   [](double a, double b) { return a + b; });
    return result;
}

Matrix Matrix::times(const Matrix& other) const {
    if (columns_ != other.rows_) {
        throw std::invalid_argument("a product needs as many columns as the other has rows");
    }
    Matrix result(rows_, other.columns_);
    for (std::size_t r = 0; r < rows_; ++r) {
        for (std::size_t c = 0; c < other.columns_; ++c) {
            double sum = 0;
            for (std::size_t i = 0; i < columns_; ++i) {
                sum += at(r, i) * other.at(i, c);
            }
            result.at(r, c) = sum;
        }
    }
    return result;
}

Matrix Matrix::scaled(double factor) const {
    Matrix result(*this);
    for (double& value : result.values_) {
        value *= factor;
    }
    return result;
}

// Brings a copy into triangular form, with the largest pivot of each column; does the same to `other`.
static double eliminate(Matrix& matrix, Matrix& other) {
    const std::size_t size = matrix.rows();
    double determinant = 1;
    for (std::size_t column = 0; column < size; ++column) {
        std::size_t pivot = column;
        for (std::size_t row = column + 1; row < size; ++row) {
            if (std::fabs(matrix.at(row, column)) > std::fabs(matrix.at(pivot, column))) {
                pivot = row;
            }
        }
        if (std::fabs(matrix.at(pivot, column)) < 1e-12) {
            return 0;
        }
        if (pivot != column) {
            determinant = -determinant;
            for (std::size_t c = 0; c < size; ++c) {
                std::swap(matrix.at(pivot, c), matrix.at(column, c));
                std::swap(other.at(pivot, c), other.at(column, c));
            }
        }
        determinant *= matrix.at(column, column);
        for (std::size_t row = 0; row < size; ++row) {
            if (row == column) {
                continue;
            }
            const double factor = matrix.at(row, column) / matrix.at(column, column);
            for (std::size_t c = 0; c < size; ++c) {
                matrix.at(row, c) -= factor * matrix.at(column, c);
                other.at(row, c) -= factor * other.at(column, c);
            }
        }
    }
    return determinant;
}

double Matrix::determinant() const {
    if (rows_ != columns_) {
        throw std::invalid_argument("only a square matrix has a determinant");
    }
    Matrix copy(*this);
    Matrix other = identity(rows_);
    return eliminate(copy, other);
}

Matrix Matrix::inverse() const {
    if (rows_ != columns_) {
        throw std::invalid_argument("only a square matrix has an inverse");
    }
    Matrix copy(*this);
    Matrix other = identity(rows_);
    if (eliminate(copy, other) == 0) {
        throw std::domain_error("the matrix is singular");
    }
    for (std::size_t row = 0; row < rows_; ++row) {
        for (std::size_t c = 0; c < columns_; ++c) {
            other.at(row, c) /= copy.at(row, row);
        }
    }
    return other;
}

Matrix Matrix::power(unsigned exponent) const {
    Matrix result = identity(rows_);
    for (unsigned i = 0; i < exponent; ++i) {
        result = result.times(*this);
    }
    return result;
}

bool Matrix::near(const Matrix& other, double tolerance) const {
    return rows_ == other.rows_ && columns_ == other.columns_ &&
           std::equal(values_.begin(), values_.end(), other.values_.begin(),
                      [tolerance](double a, double b) { return std::fabs(a - b) <= tolerance; });
}

std::ostream& operator<<(std::ostream& out, const Matrix& matrix) {
    for (std::size_t r = 0; r < matrix.rows(); ++r) {
        for (std::size_t c = 0; c < matrix.columns(); ++c) {
            out << (c == 0 ? "" : " ") << matrix.at(r, c);
        }
        out << (r + 1 < matrix.rows() ? "; " : "");
    }
    return out;
}

namespace {

class Reader {
public:
    explicit Reader(const std::string& text) : text_(text), at_(0) {}

    Matrix expression() {
        std::unique_ptr<Matrix> left(new Matrix(term()));
        while (take('+')) {
            left.reset(new Matrix(left->plus(term())));
        }
        if (!ended()) {
            throw std::invalid_argument("unexpected '" + text_.substr(at_) + "'");
        }
        return *left;
    }

private:
    Matrix term() {
        Matrix left = factor();
        while (take('*')) {
            left = left.times(factor());
        }
        return left;
    }

    Matrix factor() {
        if (word("det")) {
            return Matrix(1, 1, factor().determinant());
        }
        if (word("inv")) {
            return factor().inverse();
        }
        Matrix value = literal();
        for (;;) {
            if (take('\'')) {
                value = value.transposed();
            } else if (take('^')) {
                value = value.power(number());
            } else {
                return value;
            }
        }
    }

    Matrix literal() {
        if (!take('[')) {
            throw std::invalid_argument("expected '['");
        }
        const std::size_t end = text_.find(']', at_);
        if (end == std::string::npos) {
            throw std::invalid_argument("expected ']'");
        }
        const std::string inside = text_.substr(at_, end - at_);
        at_ = end + 1;
        return Matrix::parse(inside);
    }

    unsigned number() {
        skip();
        unsigned value = 0;
        const std::size_t begin = at_;
        while (at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_]))) {
            value = value * 10 + static_cast<unsigned>(text_[at_++] - '0');
        }
        if (at_ == begin || value > 64) {
            throw std::invalid_argument("expected an exponent up to 64");
        }
        return value;
    }

    bool word(const std::string& name) {
        skip();
        if (text_.compare(at_, name.size(), name) != 0) {
            return false;
        }
        at_ += name.size();
        return true;
    }

    bool take(char symbol) {
        skip();
        if (at_ >= text_.size() || text_[at_] != symbol) {
            return false;
        }
        ++at_;
        return true;
    }

    void skip() {
        while (at_ < text_.size() && text_[at_] == ' ') {
            ++at_;
        }
    }

    bool ended() {
        skip();
        return at_ == text_.size();
    }

    const std::string text_;
    std::size_t at_;
};

}  // namespace

Matrix evaluate(const std::string& expression) {
    return Reader(expression).expression();
}
